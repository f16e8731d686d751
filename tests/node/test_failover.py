"""An aggregator that is lost before τ is replaced by the next in the ranking, within the round."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from spheroid_node.net.link import Link
from spheroid_node.node import submitting
from spheroid_node.node.collecting import Collector
from spheroid_node.node.outbox import Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.worker import Worker
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.residual import DECAY
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import HopAddress, Message, Pong

from .conftest import Peer, World
from .test_round import peers, ranked, submission, until
from .test_worker import EagerTrainer, RunningClock

GROUP = "block-0"


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Peers that answer nothing more to workers, whose connections stand all the same."""
    found: set[str] = set()
    handle = Collector.handle

    async def handle_until_hung(collector: Collector, link: Link) -> None:
        receive = link.receive

        async def received(timeout: float | None = None) -> Message:
            message = await receive(timeout)
            if collector._client.identity.peer in found:
                await asyncio.Event().wait()
            return message

        monkeypatch.setattr(link, "receive", received)
        await handle(collector, link)

    monkeypatch.setattr(Collector, "handle", handle_until_hung)
    return found


@pytest.mark.parametrize(("lost", "hangs"), [(1, False), (2, False), (1, True)])
async def test_the_next_in_rank_takes_over_where_time_is_left(
    run: RunSpec, tmp_path: Path, lost: int, hangs: bool, hung: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four replicas; the worker's own is last in rank, and the first die or hang with its update accepted."""
    monkeypatch.setattr(submitting, "PING_SECONDS", 0.3)
    timing = {"genesis": time.time(), "period": 10.0, "settle": 3.0}
    world = World(run.model_copy(update={"round": run.round.model_copy(update=timing)}))
    world.clock = cast(Any, RunningClock())
    peers = {peer.id: peer for peer in (Peer(world, 0, tmp_path / str(number)) for number in range(4))}
    for peer in peers.values():
        await peer.start()
    *leaders, own = (peers[name] for name in ranking(world.run.run_id, GROUP, 0, peers))
    collecting = {peer.id: asyncio.create_task(peer.collector.run()) for peer in peers.values()}
    trainer, report = EagerTrainer(world.run, own.groups), Report(0, "cpu")
    outbox = Outbox(world.run, tmp_path / "outbox")
    worker = Worker(
        own.client, 0, own.store, own.sync, own.submitter, cast(Any, trainer), report, outbox
    )  # fmt: skip
    working = asyncio.create_task(worker.run())
    with capture_logs() as logs:
        async with asyncio.timeout(30):
            for number, leader in enumerate(leaders[:lost]):
                while not _accepted_by(logs, leader.id):
                    assert not working.done(), working
                    await asyncio.sleep(0.01)
                collecting[leader.id].cancel()
                if hangs:
                    hung.add(leader.id)
                else:
                    await leader.server.stop()
                assert own.store.newest(GROUP).version == 0, number
            while (manifest := own.store.newest(GROUP).manifest) is None:
                assert not working.done(), working
                await asyncio.sleep(0.01)
    for task in (working, *collecting.values()):
        task.cancel()
    await asyncio.gather(working, *collecting.values(), return_exceptions=True)
    await asyncio.gather(*(peer.server.stop() for peer in peers.values()))
    assert (manifest.round, manifest.rank) == (0, lost), "the next in the ranking, in the same round"
    assert [update.peer for update in manifest.updates] == [own.id]
    lost_ones = [
        entry["aggregator"]
        for entry in logs
        if entry["event"] == "round.aggregator_lost" and entry["group"] == GROUP
    ]
    assert lost_ones == [leader.id for leader in leaders[:lost]]


async def test_an_aggregator_that_is_silent_is_lost_until_the_deadline(
    world: World, tmp_path: Path, hung: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "PING_SECONDS", 0.02)
    async with peers(world, tmp_path, (0, 0)) as (leader, worker):
        delivery = await worker.submitter.deliver(submission(worker, 1.0), [leader.id], world.records)
        assert delivery is not None
        hung.add(leader.id)
        async with asyncio.timeout(20):
            assert await worker.submitter.await_manifest(delivery, 600.0) is False
        hung.clear()
        again = await worker.submitter.deliver(submission(worker, 1.0), [leader.id], world.records)
        assert again is not None
        hung.add(leader.id)
        world.clock.now = 80.0  # τ: nobody else would take it
        assert await worker.submitter.await_manifest(again, 0.3) is True


async def test_an_aggregator_that_is_busy_answers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its round is being closed, say; the same connection brings the manifest in the end."""
    monkeypatch.setattr(submitting, "PING_SECONDS", 0.01)
    monkeypatch.setattr(submitting, "UNANSWERED", 1000)
    pongs = []
    send = Link.send

    async def counted(link: Link, message: Message, timeout: float = 60.0) -> None:
        await send(link, message, timeout)
        if isinstance(message, Pong):
            pongs.append(link.peer)

    monkeypatch.setattr(Link, "send", counted)
    async with peers(world, tmp_path, (0, 0)) as (leader, worker):
        delivery = await worker.submitter.deliver(submission(worker, 1.0), [leader.id], world.records)
        assert delivery is not None
        async with leader.collector._turns[GROUP]:
            waiting = asyncio.create_task(worker.submitter.await_manifest(delivery, 600.0))
            await until(lambda: len(pongs) >= 5)
            world.clock.now = 80.0
            assert not waiting.done()
        async with asyncio.timeout(20):
            assert await waiting is True
        assert worker.store.newest(GROUP).version == 1


def _accepted_by(logs: list[Any], peer: str) -> bool:
    return any(
        entry["event"] == "round.receipt"
        and (entry["group"], entry["verdict"], entry["aggregator"]) == (GROUP, "accepted", peer)
        for entry in logs
    )


def cut_off(peer: Peer, *others: Peer) -> None:
    """From now on ``peer`` reaches none of ``others``."""
    dial = peer.client.dial

    async def dial_some(address: HopAddress, service: Any) -> Any:
        if address.peer in [other.id for other in others]:
            raise OSError("no route to host")
        return await dial(address, service)

    peer.client.dial = dial_some  # type: ignore[method-assign]


def mend(peer: Peer) -> None:
    del peer.client.dial


async def accepted(peer: Peer, value: float, world: World) -> tuple[str, Any]:
    """Hand in an update; who took it, and the update."""
    sent = submission(peer, value)
    delivery = await peer.submitter.deliver(sent, ranked(world), world.records)
    assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED
    return delivery.aggregator, sent


async def test_of_an_aggregator_cut_off_from_some_and_its_successor_all_follow_the_same(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        first, second, third = sorted(members, key=lambda peer: ranked(world).index(peer.id))
        cut_off(third, first)
        assert (await accepted(first, 1.0, world))[0] == first.id
        assert (await accepted(second, 2.0, world))[0] == first.id
        contributor = Contributor(world.run, GROUP, len(third.store.newest(GROUP).vector))
        taker, lost = await accepted(third, 4.0, world)
        assert taker == second.id
        contributor.resume(replace(contributor.kept(), submission=lost))
        world.clock.now = 80.0  # τ: each of the two makes a version of what it has
        await until(lambda: {GROUP} <= world.manifests.keys() and len(world.manifests[GROUP]) == 2)
        mend(third)
        for peer in members:
            await peer.sync.sync(GROUP)
        held = [peer.store.newest(GROUP) for peer in members]
        assert {(version.version, version.signer) for version in held} == {(1, first.id)}
        assert len({version.digest for version in held}) == 1
        # What the other version held is no part of it: it stays with its worker, and comes once.
        assert contributor.settle(third.store.line(GROUP)) is False
        assert np.allclose(contributor.residual.vector, DECAY * lost.delivered(), atol=1e-3)


async def test_a_cut_off_aggregator_steps_back_when_it_returns(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        first, second, third = sorted(members, key=lambda peer: ranked(world).index(peer.id))
        for other in (second, third):
            cut_off(other, first)
            cut_off(first, second, third)
            assert (await accepted(other, 2.0, world))[0] == second.id
        assert (await accepted(first, 1.0, world))[0] == first.id
        world.clock.now = 80.0
        await until(lambda: world.manifests.get(GROUP, {}).keys() == {first.id, second.id})
        assert first.store.newest(GROUP).signer == first.id
        for peer in members:
            mend(peer)
        for peer in members:
            await peer.sync.sync(GROUP)
        assert {peer.store.newest(GROUP).signer for peer in members} == {second.id}


async def test_a_version_that_was_written_and_not_announced_is_announced_after_a_restart(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peers(world, tmp_path, (0, 0)) as members:
        first, second = sorted(members, key=lambda peer: ranked(world).index(peer.id))

        async def dies(group: str, sealed: bytes) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(first.client.directory, "publish_manifest", dies)
        await accepted(first, 1.0, world)
        await accepted(second, 2.0, world)
        await until(lambda: first.store.newest(GROUP).version == 1)
        assert world.manifests == {}
        monkeypatch.undo()
        again = asyncio.create_task(first.collector.run())
        await until(lambda: GROUP in world.manifests)
        again.cancel()
        await second.sync.sync(GROUP)
        assert second.store.newest(GROUP).digest == first.store.newest(GROUP).digest


async def test_a_worker_puts_right_what_it_made_of_an_update_whose_version_came_late(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0,)) as (own,):
        trainer, outbox = EagerTrainer(world.run, own.groups), Outbox(world.run, tmp_path / "outbox")
        worker = Worker(
            own.client, 0, own.store, own.sync, own.submitter, cast(Any, trainer), Report(0, "cpu"), outbox
        )  # fmt: skip
        contributor = worker._contributors[GROUP]
        held = own.store.newest(GROUP)
        update = np.ones(len(held.vector), np.float32)
        contributor.prepare(0, Base(held.version, held.digest), update, 1, 16, bytes(16))
        sent = contributor.kept().submission
        assert sent is not None
        await worker._settle_update(GROUP)
        assert np.allclose(contributor.left_over, DECAY)
        await own.submitter.deliver(sent, [own.id], world.records)
        await until(lambda: own.store.newest(GROUP).version == 1)
        with capture_logs() as logs:
            await worker._settle_update(GROUP)
        told = {"group": GROUP, "update": sent.header.digest.hex(), "contained": True}
        assert [entry for entry in logs if told.items() <= entry.items()]
        assert np.allclose(contributor.left_over, 0.0)
        again = Contributor(world.run, GROUP, len(update))
        outbox.restore(GROUP, again, 0)
        assert np.allclose(again.left_over, 0.0), "and keeps it so"
