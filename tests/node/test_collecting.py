"""What a collector holds against peers that ask for much, or take nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from spheroid_node.net.link import Link
from spheroid_node.node import collecting, listeners, receiving
from spheroid_node.wire.codes import Reason, Verdict, WireError
from spheroid_node.wire.messages import (
    ManifestMessage,
    Message,
    Receipt,
    ReceiptMessage,
    Update,
    UpdateHeader,
)

from .conftest import Peer, World
from .test_round import GROUP, peers, submission, until


async def handed_in(author: Peer, to: Peer, value: float) -> Link:
    """The link on which an update was accepted, with nothing read after its receipt."""
    delivery = await author.submitter.deliver(submission(author, value), [to.id], author.world.records)
    assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED
    assert delivery.link is not None
    return delivery.link


async def test_who_does_not_read_keeps_nobody_from_the_manifest(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The send to the deaf one never ends; the others, and the next round, do not wait for it."""
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        leader, deaf, other = members
        held_up = asyncio.Event()
        send = Link.send

        async def stuck(link: Link, message: Message, timeout: float = 60.0) -> None:
            if link.peer == deaf.id and isinstance(message, ManifestMessage):
                held_up.set()
                await asyncio.Event().wait()
            await send(link, message, timeout)

        monkeypatch.setattr(Link, "send", stuck)
        open_link = await handed_in(deaf, leader, 1.0)
        link = await handed_in(other, leader, 2.0)
        world.clock.now = 80.0
        await link.expect(ManifestMessage, 10)
        await until(lambda: GROUP in world.manifests)
        assert held_up.is_set()
        world.clock.now = 110.0
        async with asyncio.timeout(10):
            own = submission(leader, 1.0, round=1)
            receipt = await leader.collector.submit(own.header.seal(leader.client.identity.key), own.payload)
        assert receipt.verdict is Verdict.ACCEPTED
        open_link.abort()


async def test_who_does_not_take_the_manifest_is_cut_off(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "TELL_SECONDS", 0.01)
    send = Link.send

    async def stuck(link: Link, message: Message, timeout: float = 60.0) -> None:
        if isinstance(message, ManifestMessage):
            async with asyncio.timeout(timeout):
                await asyncio.Event().wait()
        await send(link, message, timeout)

    monkeypatch.setattr(Link, "send", stuck)
    async with peers(world, tmp_path, (0, 0)) as (leader, deaf):
        link = await handed_in(deaf, leader, 1.0)
        world.clock.now = 80.0
        with pytest.raises(ConnectionError):
            await link.receive(10)


async def test_refused_headers_get_no_manifest_and_there_are_only_so_many(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0, 1)) as (leader, stranger):
        told: list[str] = []
        add = leader.collector._listeners.add
        leader.collector._listeners.add = lambda group, link: told.append(link.peer) or add(group, link)  # type: ignore[method-assign,func-returns-value]
        envelope = submission(stranger, 1.0).header.seal(stranger.client.identity.key)
        link = await stranger.client.dial(leader.address, "round")
        for _ in range(collecting.MAX_UPDATES_IN_A_ROUND):
            await link.send(Update(header=envelope, hashes=b""))
            answer = await link.expect(ReceiptMessage, 10)
            assert Receipt.unseal(answer.receipt)[1].reason is Reason.NOT_ELIGIBLE
        await link.send(Update(header=envelope, hashes=b""))
        with pytest.raises(WireError, match="busy"):
            await link.expect(ReceiptMessage, 10)
        assert told == []


async def test_a_link_listens_once_and_no_longer_than_it_lives(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (leader, author):
        listening = leader.collector._listeners._links[GROUP]
        link = await handed_in(author, leader, 1.0)
        envelope = submission(author, 1.0).header.seal(author.client.identity.key)
        await link.send(Update(header=envelope, hashes=b""))
        await link.expect(ReceiptMessage, 10)
        assert len(listening) == 1
        await link.close()
        await until(lambda: not listening)


async def test_who_was_refused_looks_for_the_version_in_the_dht(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 1)) as (leader, stranger):
        refused = await stranger.submitter.deliver(submission(stranger, 1.0), [leader.id], world.records)
        assert refused is not None and refused.receipt.verdict is Verdict.REFUSED
        async with asyncio.timeout(10):
            assert await stranger.submitter.await_manifest(refused, 600.0)


async def test_one_update_is_in_memory_at_a_time_while_others_come_in(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = world.run.round.model_copy(update={"screen": 0.5, "compression": "float32"})
    world.run = world.run.model_copy(update={"round": rules})
    async with peers(world, tmp_path, (0, 0, 0, 0)) as (leader, *authors):
        taken, tried_at_once = [], []
        take = receiving.take

        def counted(*arguments: Any) -> None:
            take(*arguments)
            taken.append(arguments)

        class Slow:
            trying = 0

            async def worse_by(self, header: UpdateHeader, payload: bytes, scale: float) -> float | None:
                self.trying += 1
                tried_at_once.append(self.trying)
                await until(lambda: len(taken) == len(authors))
                await asyncio.sleep(0.05)  # so that others would be seen here
                self.trying -= 1
                return 0.0

        monkeypatch.setattr(receiving, "take", counted)
        leader.collector._screening = Slow()
        links = await asyncio.gather(*(handed_in(author, leader, 1.0) for author in authors))
        assert tried_at_once == [1, 1, 1]
        for link in links:
            link.abort()
