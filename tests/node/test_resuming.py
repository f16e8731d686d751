"""Updates whose connection breaks on the way: the rest is sent, by their author and in their round."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from spheroid_node.net.link import Link
from spheroid_node.node import receiving, submitting
from spheroid_node.rounds import aggregation, robust
from spheroid_node.rounds.ledger import Submission
from spheroid_node.wire import tensors
from spheroid_node.wire.codes import Verdict, WireError
from spheroid_node.wire.messages import Chunk, Message, Proceed, ReceiptMessage, Update
from spheroid_node.wire.tensors import chunk_count, chunk_hashes, chunks

from .conftest import Peer, World
from .test_round import GROUP, peers, ranked, submission, until


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the chunks that aggregators have put by; chunks are small here."""
    found: list[int] = []
    take = receiving.take

    def noted(meter: Any, spool: Any, chunk: Any) -> None:
        take(meter, spool, chunk)
        found.append(meter.count - 1)

    monkeypatch.setattr(receiving, "take", noted)
    monkeypatch.setattr(submitting, "PAUSES", (0.01, 0.01))
    for module in (tensors, aggregation, robust, receiving):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1024)
    return found


async def offered(author: Peer, to: Peer, sent: Submission, key: Any = None) -> tuple[Link, Message]:
    """A new connection with an update begun on it, and the answer."""
    link = await author.client.dial(to.address, "round")
    envelope = sent.header.seal(key or author.client.identity.key)
    await link.send(Update(header=envelope, hashes=chunk_hashes(sent.payload)))
    return link, await link.receive(10)


async def send(link: Link, sent: Submission, first: int, end: int | None = None) -> None:
    for index, chunk in list(enumerate(chunks(sent.payload)))[first:end]:
        await link.send(Chunk(index=index, data=bytes(chunk)))


async def broken_off(author: Peer, to: Peer, sent: Submission, taken: list[int], count: int = 3) -> None:
    """After ``count`` chunks; the aggregator has noticed."""
    already = len(taken)
    link, answer = await offered(author, to, sent)
    assert answer == Proceed()
    await send(link, sent, 0, count)
    await until(lambda: len(taken) == already + count)
    link.abort()
    await until(lambda: (author.id, GROUP) in to.collector._arrivals._broken_off)


async def test_only_the_rest_is_sent_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        by_name = {peer.id: peer for peer in members}
        leader, _, worker = (by_name[name] for name in ranked(world))
        sent = submission(worker, 1.0)
        last = chunk_count(len(sent.payload)) - 1
        assert last > 5
        cuts = [3, last]  # by the second time all but one chunk is there
        send_body = Link.send

        async def cutting(link: Link, message: Message, timeout: float = 60.0) -> None:
            if isinstance(message, Chunk) and cuts and message.index == cuts[0]:
                await until(lambda: len(taken) == cuts[0])
                cuts.pop(0)
                link.abort()
            await send_body(link, message, timeout)

        monkeypatch.setattr(Link, "send", cutting)
        delivery = await worker.submitter.deliver(sent, ranked(world), world.records)
        assert delivery is not None and not cuts
        assert (delivery.aggregator, delivery.receipt.verdict) == (leader.id, Verdict.ACCEPTED)
        assert taken == list(range(last + 1)), "each once"
        assert not leader.collector._arrivals._broken_off


async def test_who_breaks_off_where_it_did_before_is_left_for_the_next(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        by_name = {peer.id: peer for peer in members}
        leader, successor, worker = (by_name[name] for name in ranked(world))
        send_body = Link.send
        dialled = []

        async def cutting(link: Link, message: Message, timeout: float = 60.0) -> None:
            if isinstance(message, Update):
                dialled.append(link.peer)
            if isinstance(message, Chunk) and link.peer == leader.id:
                link.abort()
            await send_body(link, message, timeout)

        monkeypatch.setattr(Link, "send", cutting)
        delivery = await worker.submitter.deliver(submission(worker, 1.0), ranked(world), world.records)
        assert delivery is not None and delivery.aggregator == successor.id
        assert dialled == [leader.id, leader.id, successor.id]


async def test_nobody_else_goes_on_with_it(world: World, tmp_path: Path, taken: list[int]) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as (leader, author, other):
        sent = submission(author, 1.0)
        await broken_off(author, leader, sent, taken)
        link, answer = await offered(other, leader, sent)  # signed by itself
        assert answer == Proceed(first=0)
        link.abort()
        link = await other.client.dial(leader.address, "round")
        envelope = sent.header.seal(author.client.identity.key)
        await link.send(Update(header=envelope, hashes=chunk_hashes(sent.payload)))
        with pytest.raises(WireError, match="not-authentic"):
            await link.expect(Proceed, 10)
        link, answer = await offered(author, leader, sent)
        assert answer == Proceed(first=3)
        await send(link, sent, 3)
        await link.expect(ReceiptMessage, 10)
        link.abort()


async def test_another_update_of_its_author_begins_anew(
    world: World, tmp_path: Path, taken: list[int]
) -> None:
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        sent = submission(author, 1.0)
        await broken_off(author, leader, sent, taken)
        another = sent.header.model_copy(update={"nonce": b"n" * 16})
        link, answer = await offered(author, leader, Submission(another, sent.payload))
        assert answer == Proceed(first=0)
        link.abort()


async def test_what_broke_off_ends_with_its_round(world: World, tmp_path: Path, taken: list[int]) -> None:
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        await broken_off(author, leader, submission(author, 1.0), taken)
        (arriving,) = leader.collector._arrivals._broken_off.values()
        world.clock.now = 80.0
        await until(lambda: not leader.collector._arrivals._broken_off)
        assert arriving.spool.closed
        world.clock.now = 110.0
        link, answer = await offered(author, leader, submission(author, 1.0, round=1))
        assert answer == Proceed(first=0)
        link.abort()


async def test_a_chunk_that_was_not_announced_is_refused_at_once(
    world: World, tmp_path: Path, taken: list[int]
) -> None:
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        sent = submission(author, 1.0)
        link, answer = await offered(author, leader, sent)
        assert answer == Proceed()
        await send(link, sent, 0, 1)
        await link.send(Chunk(index=1, data=bytes(1024)))
        with pytest.raises(WireError, match="not-authentic"):
            await link.expect(ReceiptMessage, 10)
        assert taken == [0]


async def test_hashes_that_the_digest_does_not_prove_are_refused(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        sent = submission(author, 1.0)
        for hashes in (b"", chunk_hashes(bytes(len(sent.payload))), chunk_hashes(sent.payload) + bytes(32)):
            link = await author.client.dial(leader.address, "round")
            envelope = sent.header.seal(author.client.identity.key)
            await link.send(Update(header=envelope, hashes=hashes))
            with pytest.raises(WireError, match="not-authentic"):
                await link.expect(Proceed, 10)


async def test_the_newest_connection_of_an_author_counts(
    world: World, tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many it opens, there is one place for its update."""
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        places: list[Any] = []
        spooled = leader.collector._arrivals._spooled

        def counted() -> Any:
            places.append(spooled())
            return places[-1]

        monkeypatch.setattr(leader.collector._arrivals, "_spooled", counted)
        sent = submission(author, 1.0)
        links = []
        for number in range(4):
            link, answer = await offered(author, leader, sent)
            assert answer == Proceed(first=number), "the one before is lost, what it brought is not"
            await send(link, sent, number, number + 1)
            await until(lambda number=number: len(taken) == number + 1)  # type: ignore[misc]
            links.append(link)
        for link in links[:-1]:
            with pytest.raises(ConnectionError):
                await link.receive(10)
        await send(links[-1], sent, 4)
        await links[-1].expect(ReceiptMessage, 10)
        assert len(places) == 1 and places[0].closed
        assert not leader.collector._arrivals._turns
        links[-1].abort()


async def test_so_many_updates_wait_for_their_rest(
    world: World, tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "MAX_BROKEN_OFF", 2)
    async with peers(world, tmp_path, (0, 0, 0, 0)) as (leader, *authors):
        for author in authors:
            await broken_off(author, leader, submission(author, 1.0), taken)
        kept = leader.collector._arrivals._broken_off
        assert [author for author, _ in kept] == [author.id for author in authors[1:]]


async def test_a_time_that_is_up_is_not_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pause that ends after τ."""
    monkeypatch.setattr(submitting, "PAUSES", (100.0,))
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        send_body = Link.send

        async def cutting(link: Link, message: Message, timeout: float = 60.0) -> None:
            if isinstance(message, Chunk):
                link.abort()
            await send_body(link, message, timeout)

        monkeypatch.setattr(Link, "send", cutting)
        async with asyncio.timeout(20):
            assert not await author.submitter.deliver(submission(author, 1.0), [leader.id], world.records)
