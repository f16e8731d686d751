"""Versions from holder to fetcher in hashed chunks (protocols/transfer.md).

A fetcher shares the chunks among several holders and believes none of them: the signed manifest proves the
digest, the digest proves the list of hashes, a hash proves its chunk. A holder that leaves, lies or is slow
only costs time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from spheroid_node.errors import TransferFailed
from spheroid_node.net.link import Link
from spheroid_node.net.partial import Partial
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Chunk, Error, HopAddress, Listing, Manifest, Read, Want
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    chunk_count,
    chunk_hash,
    digest_of_hashes,
    split_hashes,
)

log = structlog.get_logger()

IDLE_TIMEOUT = 60.0
ANSWER_TIMEOUT = 20.0
PARALLEL_HOLDERS = 4
READ_AHEAD = 4
"""Chunks asked of one holder at a time, so that a long way to it does not leave the line empty."""
PATIENCE = 3.0
"""Seconds that a holder with nothing left to give waits before it is asked for what another still owes."""

Dial = Callable[[HopAddress], Awaitable[Link]]


class VersionSource(Protocol):
    """The versions that a node holds."""

    def listing(self, group: str, version: int) -> Listing | None:
        """What is held of ``version`` (−1: the newest), or None."""

    def chunk(self, group: str, version: int, index: int) -> bytes | None:
        """One chunk, or None when the version is gone or has no such chunk."""


async def serve_transfer(link: Link, source: VersionSource) -> None:
    """Answer Want and Read until the fetcher leaves; the service ``transfer`` of a LinkServer."""
    while True:
        message = await link.receive(IDLE_TIMEOUT)
        if isinstance(message, Want):
            listing = source.listing(message.group, message.version)
            await link.send(listing or Error(code=ErrorCode.NOT_FOUND))
        elif isinstance(message, Read):
            data = source.chunk(message.group, message.version, message.index)
            gone = Error(code=ErrorCode.VERSION_GONE)
            await link.send(gone if data is None else Chunk(index=message.index, data=data))
        else:
            raise WireError(ErrorCode.UNEXPECTED, f"{type(message).__name__} in a transfer")


async def fetch_version(
    holders: Sequence[HopAddress],
    group: str,
    version: int,
    expected_digest: bytes | None,
    size: int,
    dial: Dial,
    answer_timeout: float = ANSWER_TIMEOUT,
    patience: float = PATIENCE,
    partial: Partial | None = None,
) -> tuple[memoryview, Listing]:
    """The ``size`` payload bytes of a version (−1: the newest) and the listing they came under.

    holders: in order of preference; the first few share the work and the others stand in.
    expected_digest: None takes the digest from the manifest in the listing, whose signer the caller then
    checks. dial: opens a ``transfer`` link. partial: what an earlier attempt at this digest brought; it has
    what this one brings too. Raises :class:`TransferFailed`.
    """
    partial = partial or Partial(expected_digest or b"", size)
    fetch = _Fetch(group, version, expected_digest, partial, dial, answer_timeout, patience)
    waiting = deque(holders)
    running: set[asyncio.Task[None]] = set()
    causes: list[str] = []
    try:
        while not (fetch.complete and fetch.listing):
            while waiting and len(running) < PARALLEL_HOLDERS:
                running.add(asyncio.create_task(fetch.from_holder(waiting.popleft(), causes)))
            if not running:
                raise TransferFailed(group, version, causes)
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return partial.payload, fetch.listing


class _Fetch:
    """What the holders of one fetch share."""

    def __init__(
        self,
        group: str,
        version: int,
        digest: bytes | None,
        partial: Partial,
        dial: Dial,
        answer_timeout: float,
        patience: float,
    ) -> None:
        self.listing: Listing | None = None
        self._group = group
        self._version = version
        self._digest = digest
        self._partial = partial
        self._size = len(partial.payload)
        self._dial = dial
        self._answer_timeout = answer_timeout
        self._patience = patience
        self._given_back = asyncio.Event()
        self._missing = partial.missing
        self._untried = deque(sorted(self._missing))

    @property
    def complete(self) -> bool:
        return not self._missing

    async def from_holder(self, holder: HopAddress, causes: list[str]) -> None:
        """Take chunks from one holder until none are missing, or it fails; then its cause is noted."""
        asked: deque[int] = deque()
        try:
            link = await self._dial(holder)
            try:
                await self._read(link, asked)
            finally:
                link.abort()
        except (OSError, WireError) as error:  # LinkFailed, LinkClosed and TimeoutError are OSErrors
            causes.append(f"{holder.peer}: {str(error) or 'timed out'}")
            log.info("transfer.holder_failed", group=self._group, peer=holder.peer, cause=causes[-1])
        finally:
            self._untried.extend(index for index in asked if index in self._missing)
            self._given_back.set()

    async def _read(self, link: Link, asked: deque[int]) -> None:
        await link.send(Want(group=self._group, version=self._version))
        listing = self._agree(await link.expect(Listing, self._answer_timeout))
        patient = True
        while self._missing:
            while len(asked) < READ_AHEAD and (index := self._next(asked, patient)) is not None:
                asked.append(index)
                await link.send(Read(group=self._group, version=listing.version, index=index))
            if not asked:
                patient = await self._wait_for_work()
                continue
            self._store(listing, asked[0], await link.expect(Chunk, self._answer_timeout))
            asked.popleft()

    async def _wait_for_work(self) -> bool:
        """Wait until a holder fails and gives back what it owed; False when that takes too long."""
        self._given_back.clear()
        try:
            async with asyncio.timeout(self._patience):
                await self._given_back.wait()
        except TimeoutError:
            return False
        return True

    def _next(self, asked: deque[int], patient: bool) -> int | None:
        """A chunk that nobody owes; when patience is at its end, also one that another holder owes."""
        if self._untried:
            return self._untried.popleft()
        if patient:
            return None
        return next((index for index in sorted(self._missing) if index not in asked), None)

    def _store(self, listing: Listing, index: int, chunk: Chunk) -> None:
        start = index * CHUNK_BYTES
        expected = listing.hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if chunk.index != index:
            raise WireError(ErrorCode.UNEXPECTED, f"chunk {chunk.index} instead of {index}")
        if len(chunk.data) != min(CHUNK_BYTES, self._size - start) or chunk_hash(chunk.data) != expected:
            raise WireError(ErrorCode.NOT_AUTHENTIC, f"chunk {index} does not match its hash")
        self._partial.add(index, chunk.data)

    def _agree(self, listing: Listing) -> Listing:
        """The listing, if it proves itself and is the one that the other holders showed."""
        if listing.group != self._group or self._version not in (-1, listing.version):
            raise WireError(ErrorCode.UNEXPECTED, "a listing of another version")
        if listing.size != self._size or len(listing.hashes) != chunk_count(self._size) * DIGEST_BYTES:
            raise WireError(ErrorCode.MALFORMED, f"a listing of {listing.size} bytes, not {self._size}")
        digest = self._digest or self._signed_digest(listing)
        hashes = listing.hashes
        if digest_of_hashes(split_hashes(hashes)) != digest:
            raise WireError(ErrorCode.NOT_AUTHENTIC, "the chunk hashes do not match the version's digest")
        if self.listing is None:
            self.listing = listing
            self._partial.begin(hashes)
        if (listing.version, hashes) != (self.listing.version, self.listing.hashes):
            raise WireError(ErrorCode.UNEXPECTED, "another version than the first holder's")
        return listing

    def _signed_digest(self, listing: Listing) -> bytes:
        _, manifest = Manifest.unseal(listing.manifest)
        if (manifest.group, manifest.version) != (listing.group, listing.version):
            raise WireError(ErrorCode.NOT_AUTHENTIC, "the manifest is of another version")
        return manifest.digest
