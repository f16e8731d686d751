"""Versions fetched over real links from holders that are honest, slow, leaving or lying."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from spheroid_node.errors import TransferFailed
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.link import Link
from spheroid_node.net.partial import Partial
from spheroid_node.net.transfer import fetch_version, serve_transfer
from spheroid_node.wire.codes import ErrorCode, Verdict, WireError
from spheroid_node.wire.messages import (
    Chunk,
    Error,
    HopAddress,
    Listing,
    Manifest,
    Read,
    UpdateOutcome,
    Want,
    Welcome,
)
from spheroid_node.wire.tensors import CHUNK_BYTES, chunk_hash, chunks, payload_digest

GROUP, VERSION = "block-0", 3
PAYLOAD = b"".join(bytes([index]) * CHUNK_BYTES for index in range(10)) + b"the end"
DIGEST = payload_digest(PAYLOAD)


def sealed_manifest(signer: Identity, digest: bytes = DIGEST, version: int = VERSION) -> bytes:
    return Manifest(
        run="0" * 16,
        group=GROUP,
        round=7,
        version=version,
        parent=bytes(32),
        digest=digest,
        elements=len(PAYLOAD) // 4,
        rank=0,
        steps=1,
        total=version,
        updates=[
            UpdateOutcome(peer=signer.peer, digest=bytes(32), tokens=1, norm=1, verdict=Verdict.ACCEPTED)
        ],
    ).seal(signer.key)


class Source:
    """Holds one version of one group, and counts what it gives."""

    def __init__(self, payload: bytes = PAYLOAD, manifest: bytes = b"") -> None:
        self.payload = payload
        self.manifest = manifest
        self.given: list[int] = []

    def listing(self, group: str, version: int) -> Listing | None:
        if group != GROUP or version not in (-1, VERSION):
            return None
        hashes = b"".join(chunk_hash(chunk) for chunk in chunks(self.payload))
        return Listing(
            group=group, version=VERSION, size=len(self.payload), hashes=hashes, manifest=self.manifest
        )

    def chunk(self, group: str, version: int, index: int) -> bytes | None:
        if group != GROUP or version != VERSION or index > len(self.payload) // CHUNK_BYTES:
            return None
        self.given.append(index)
        return self.payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@pytest.fixture
def holder(net) -> Callable[..., Awaitable[HopAddress]]:
    async def start(source: Source, serve=serve_transfer) -> HopAddress:
        return await net.serve(ephemeral_identity(), lambda link: serve(link, source))

    return start


@pytest.fixture
def fetch(net, alice) -> Callable[..., Awaitable[tuple[bytearray, Listing]]]:
    async def start(
        *holders: HopAddress,
        version: int = VERSION,
        digest: bytes | None = DIGEST,
        answer_timeout: float = 10.0,
        patience: float = 60.0,
        partial: Partial | None = None,
    ) -> tuple[bytearray, Listing]:
        async def dial(address: HopAddress) -> Link:
            return await net.dial(address, alice)

        async with asyncio.timeout(60):
            return await fetch_version(
                holders, GROUP, version, digest, len(PAYLOAD), dial, answer_timeout, patience, partial
            )

    return start


async def leaves(link: Link, source: Source) -> None:
    """Gives the listing and two chunks, then is gone."""
    reads = 0
    while reads < 2:
        message = await link.receive()
        if isinstance(message, Read):
            reads += 1
            await link.send(
                Chunk(index=message.index, data=source.chunk(GROUP, VERSION, message.index) or b"")
            )
        else:
            await link.send(source.listing(GROUP, VERSION) or Error(code=ErrorCode.NOT_FOUND))


async def stalls(link: Link, source: Source) -> None:
    """Gives the listing, then nothing more, but stays."""
    await link.receive()
    await link.send(source.listing(GROUP, VERSION) or Error(code=ErrorCode.NOT_FOUND))
    while True:
        await link.receive()


async def corrupts(link: Link, source: Source) -> None:
    """Gives a true listing and false chunks."""
    await link.receive()
    await link.send(source.listing(GROUP, VERSION) or Error(code=ErrorCode.NOT_FOUND))
    while True:
        message = await link.receive()
        if isinstance(message, Read):
            data = bytearray(source.chunk(GROUP, VERSION, message.index) or b"")
            data[-1] ^= 1
            await link.send(Chunk(index=message.index, data=bytes(data)))


async def forgets(link: Link, source: Source) -> None:
    """Gives a true listing and no longer has the version."""
    await link.receive()
    await link.send(source.listing(GROUP, VERSION) or Error(code=ErrorCode.NOT_FOUND))
    while True:
        await link.receive()
        await link.send(Error(code=ErrorCode.VERSION_GONE))


async def mixes_up(link: Link, source: Source) -> None:
    """Answers with the chunk before the one asked for."""
    await link.receive()
    await link.send(source.listing(GROUP, VERSION) or Error(code=ErrorCode.NOT_FOUND))
    while True:
        message = await link.receive()
        if isinstance(message, Read):
            await link.send(Chunk(index=max(0, message.index - 1), data=source.payload[:CHUNK_BYTES]))


async def test_one_holder(holder, fetch) -> None:
    source = Source()
    payload, listing = await fetch(await holder(source))
    assert payload == PAYLOAD
    assert listing.version == VERSION
    assert sorted(source.given) == list(range(11))


async def test_several_holders_share_the_work(holder, fetch) -> None:
    sources = [Source() for _ in range(3)]
    payload, _ = await fetch(*[await holder(source) for source in sources])
    assert payload == PAYLOAD
    assert sorted(index for source in sources for index in source.given) == list(range(11))
    assert sum(bool(source.given) for source in sources) > 1


@pytest.mark.parametrize("behaviour", [leaves, stalls, corrupts, forgets, mixes_up])
@pytest.mark.parametrize("order", [0, 1], ids=["bad-first", "bad-second"])
async def test_a_bad_holder_only_costs_time(holder, fetch, behaviour, order) -> None:
    bad, good = await holder(Source(), behaviour), await holder(Source())
    holders = (bad, good) if order == 0 else (good, bad)
    waits = {"patience": 0.2, "answer_timeout": 300.0} if behaviour is stalls else {}
    payload, _ = await fetch(*holders, **waits)
    assert payload == PAYLOAD


async def test_holders_in_reserve_stand_in(holder, fetch) -> None:
    """More bad holders than are asked at the same time."""
    bad = [await holder(Source(), behaviour) for behaviour in (leaves, corrupts, forgets, mixes_up, leaves)]
    payload, _ = await fetch(*bad, await holder(Source()))
    assert payload == PAYLOAD


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        (leaves, "closed"),
        (stalls, "timed out"),
        (corrupts, "hash"),
        (forgets, "version-gone"),
        (mixes_up, "instead of"),
    ],
)
async def test_bad_holders_alone_are_named_with_what_they_did(holder, fetch, behaviour, cause) -> None:
    bad = await holder(Source(), behaviour)
    with pytest.raises(TransferFailed, match=f"version 3 of block-0: {bad.peer}.*{cause}"):
        await fetch(bad, answer_timeout=0.5)


async def test_unreachable_and_unknown(holder, fetch, bob) -> None:
    gone = HopAddress(peer=bob.peer, host="127.0.0.1", port=1)
    with pytest.raises(TransferFailed, match="refused"):
        await fetch(gone)
    with pytest.raises(TransferFailed, match="no holder is known"):
        await fetch()
    with pytest.raises(TransferFailed, match="not-found"):
        await fetch(await holder(Source()), version=4)
    assert (await fetch(gone, await holder(Source())))[0] == PAYLOAD


async def test_another_payload_under_the_same_version(holder, fetch) -> None:
    other = bytes(len(PAYLOAD))
    with pytest.raises(TransferFailed, match="digest"):
        await fetch(await holder(Source(other)))
    assert (await fetch(await holder(Source(other)), await holder(Source())))[0] == PAYLOAD


async def test_another_size(holder, fetch) -> None:
    with pytest.raises(TransferFailed, match="bytes"):
        await fetch(await holder(Source(PAYLOAD + b"more")))


async def test_newest_version_by_its_manifest(holder, fetch, bob) -> None:
    payload, listing = await fetch(
        await holder(Source(manifest=sealed_manifest(bob))), version=-1, digest=None
    )
    assert payload == PAYLOAD
    assert Manifest.unseal(listing.manifest)[0] == bob.peer


@pytest.mark.parametrize("change", [{"digest": bytes(32)}, {"version": VERSION + 1}])
async def test_a_manifest_of_something_else_proves_nothing(holder, fetch, bob, change) -> None:
    with pytest.raises(TransferFailed):
        await fetch(await holder(Source(manifest=sealed_manifest(bob, **change))), version=-1, digest=None)


async def test_no_manifest_proves_nothing(holder, fetch) -> None:
    with pytest.raises(TransferFailed):
        await fetch(await holder(Source()), version=-1, digest=None)


async def test_the_server_refuses_other_messages_and_missing_chunks(net, holder, alice) -> None:
    link = await net.dial(await holder(Source()), alice)
    await link.send(Read(group=GROUP, version=VERSION, index=2**40))
    with pytest.raises(WireError) as refused:
        await link.expect(Chunk, 10)
    assert refused.value.code is ErrorCode.VERSION_GONE
    await link.send(Want(group="block-9", version=0))
    with pytest.raises(WireError, match="not-found"):
        await link.expect(Listing, 10)
    await link.send(Welcome())
    with pytest.raises(WireError, match="unexpected"):
        await link.expect(Chunk, 10)


# --- going on from what has arrived ----------------------------------------------------------------


async def leaves_after_two(holder, partial: Partial, fetch) -> None:
    """A fetch whose only holder leaves after two chunks, of which one may be lost with it."""
    with pytest.raises(TransferFailed):
        await fetch(await holder(Source(), leaves), partial=partial)
    assert len(partial.missing) in (9, 10)


async def test_a_fetch_goes_on_from_what_an_earlier_one_brought(holder, fetch) -> None:
    partial, source = Partial(DIGEST, len(PAYLOAD)), Source()
    await leaves_after_two(holder, partial, fetch)
    missing = set(partial.missing)
    payload, _ = await fetch(await holder(source), partial=partial)
    assert payload is partial.payload and payload == PAYLOAD
    assert set(source.given) == missing


async def test_another_process_goes_on_from_the_file(holder, fetch, tmp_path) -> None:
    file, source = tmp_path / "partial" / GROUP, Source()
    await leaves_after_two(holder, Partial(DIGEST, len(PAYLOAD), file, save_after=0.0), fetch)
    again = Partial.resume(DIGEST, len(PAYLOAD), file, save_after=0.0)
    missing = set(again.missing)
    assert len(missing) in (9, 10)
    payload, _ = await fetch(await holder(source), partial=again)
    assert payload == PAYLOAD and set(source.given) == missing
    assert not Partial.resume(DIGEST, len(PAYLOAD), file).missing
    again.close()
    assert not file.exists()


@pytest.mark.parametrize("damage", ["chunk", "hashes", "cut", "other"])
async def test_what_a_crash_left_in_the_file_is_believed_only_as_far_as_it_proves_itself(
    holder, fetch, tmp_path, damage
) -> None:
    file = tmp_path / GROUP
    partial = Partial(DIGEST, len(PAYLOAD), file, save_after=0.0)
    await fetch(await holder(Source()), partial=partial)
    saved = bytearray(file.read_bytes())
    if damage == "chunk":
        saved[11 * 32 + 3 * CHUNK_BYTES] ^= 1
    elif damage == "hashes":
        saved[0] ^= 1
    elif damage == "cut":
        del saved[11 * 32 + 5 * CHUNK_BYTES + 7 :]
    file.write_bytes(saved)
    digest = bytes(32) if damage == "other" else DIGEST
    again = Partial.resume(digest, len(PAYLOAD), file)
    everything = set(range(11))
    assert again.missing == {"chunk": {3}, "cut": set(range(5, 11))}.get(damage, everything)


async def test_a_fetch_that_is_short_writes_no_file(holder, fetch, tmp_path) -> None:
    await fetch(await holder(Source()), partial=Partial(DIGEST, len(PAYLOAD), tmp_path / GROUP))
    assert not list(tmp_path.iterdir())


async def test_a_full_disk_does_not_end_a_fetch(holder, fetch, tmp_path) -> None:
    (tmp_path / "partial").write_text("no folder")
    partial = Partial(DIGEST, len(PAYLOAD), tmp_path / "partial" / GROUP, save_after=0.0)
    assert (await fetch(await holder(Source()), partial=partial))[0] == PAYLOAD
