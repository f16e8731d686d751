"""Updates on their way in: each chunk proves itself, and what broke off waits for the rest in its round."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from spheroid_node.net.links import Link, LinkClosed
from spheroid_node.rounds.aggregation import PayloadMeter
from spheroid_node.rounds.aggregator import Offer
from spheroid_node.wire.messages import UpdateHeader
from spheroid_node.wire.tensors import CHUNK_BYTES

IN_MEMORY_BYTES = CHUNK_BYTES
"""An update up to this size is spooled in memory, a larger one on disk: many may come at the same time."""
MAX_BROKEN_OFF = 16
"""Updates that wait for their rest; of more, the one that has waited longest is forgotten."""


@dataclass
class Arriving:
    """An update of which some chunks are there."""

    header: UpdateHeader
    meter: PayloadMeter
    spool: IO[bytes]

    def take(self, chunk: bytes) -> None:
        take(self.meter, self.spool, chunk)

    def chunks(self) -> Iterator[bytes | memoryview]:
        return chunks_of(self.spool)


@dataclass
class _Turn:
    """Of an author in a group; ``users`` have it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    link: Link | None = None
    users: int = 0


class Arrivals:
    """One update of each author and group at a time, so that nobody fills the disk.

    spooled: opens an empty place for an update; is_open: whether the round of a header still takes updates.
    """

    def __init__(self, spooled: Callable[[], IO[bytes]], is_open: Callable[[UpdateHeader], bool]) -> None:
        self._spooled = spooled
        self._is_open = is_open
        self._turns: dict[tuple[str, str], _Turn] = {}
        self._broken_off: dict[tuple[str, str], Arriving] = {}
        """By author and group, the oldest first."""

    @contextlib.asynccontextmanager
    async def turn(self, link: Link, group: str) -> AsyncIterator[None]:
        """The newest connection of an author counts: it opens one when it has lost the one before."""
        key = link.peer, group
        turn = self._turns.setdefault(key, _Turn())
        if turn.link is not None:
            turn.link.abort()
        turn.link = link
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]

    @contextlib.contextmanager
    def arriving(self, offer: Offer, hashes: bytes) -> Iterator[Arriving]:
        """What has come of an update, kept if its connection breaks. To be used in the author's turn.

        Raises :class:`WireError` as :meth:`Offer.meter`.
        """
        key = offer.author, offer.header.group
        arriving = self._broken_off.pop(key, None)
        if arriving is not None and arriving.header != offer.header:
            arriving.spool.close()
            arriving = None
        if arriving is None:
            arriving = Arriving(offer.header, offer.meter(hashes), self._spooled())
        kept = False
        try:
            yield arriving
        except (LinkClosed, TimeoutError):
            kept = self._keep(key, arriving)
            raise
        finally:
            if not kept:
                arriving.spool.close()

    def forget(self, group: str) -> None:
        """Its round is over."""
        for key in [key for key in self._broken_off if key[1] == group]:
            self._broken_off.pop(key).spool.close()

    def _keep(self, key: tuple[str, str], arriving: Arriving) -> bool:
        if not self._is_open(arriving.header):
            return False
        while len(self._broken_off) >= MAX_BROKEN_OFF:
            self._broken_off.pop(next(iter(self._broken_off))).spool.close()
        self._broken_off[key] = arriving
        return True


def take(meter: PayloadMeter, spool: IO[bytes], chunk: bytes | memoryview) -> None:
    """Measure a chunk and put it by. Raises :class:`WireError` like the meter."""
    meter.feed(chunk)
    spool.write(chunk)


def chunks_of(spool: IO[bytes]) -> Iterator[bytes | memoryview]:
    """What was put by, from the beginning."""
    spool.seek(0)
    while chunk := spool.read(CHUNK_BYTES):
        yield chunk
