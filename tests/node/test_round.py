"""Collector, submitter and synchroniser of several nodes against each other, over real links."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from spheroid_node.model.initial import initial_vector
from spheroid_node.net.directory import Directory
from spheroid_node.node.client import fetch_model
from spheroid_node.node.collecting import Collector
from spheroid_node.node.holdings import owns
from spheroid_node.node.report import Report, Reporter
from spheroid_node.node.threads import to_its_end
from spheroid_node.node.versions import Held
from spheroid_node.rounds.collection import Collection
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.ledger import Submission
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict, WireError
from spheroid_node.wire.messages import Manifest, Proceed, Receipt, Update, UpdateOutcome
from spheroid_node.wire.tensors import Vector, payload_digest, vector_digest

from .conftest import MemoryDirectory, Peer, World

GROUP = "block-0"


class RunningClock:
    """DHT time that goes on from ``now``."""

    def __init__(self, now: float) -> None:
        self._ahead = now - time.monotonic()

    def time(self) -> float:
        return time.monotonic() + self._ahead


@asynccontextmanager
async def peers(world: World, tmp_path: Path, blocks: tuple[int, ...]) -> AsyncIterator[list[Peer]]:
    started = [Peer(world, block, tmp_path / str(number)) for number, block in enumerate(blocks)]
    closing = []
    try:
        for peer in started:
            await peer.start()
            closing.append(asyncio.create_task(peer.collector.run()))
        yield started
    finally:
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        await asyncio.gather(*(peer.server.stop() for peer in started))


def submission(peer: Peer, value: float, round: int = 0, tokens: int = 16, group: str = GROUP) -> Submission:
    held = peer.store.newest(group)
    update: Vector = np.full(len(held.vector), value, dtype=np.float32)
    contributor = Contributor(peer.world.run, group, len(held.vector))
    base = held.base
    return contributor.prepare(round, base, update, 1, tokens, bytes(16))


def ranked(world: World, round: int = 0, group: str = GROUP) -> list[str]:
    members = [peer for peer, record in world.records.items() if owns(record, group)]
    return ranking(world.run.run_id, group, round, members)


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.01)


async def test_both_updates_become_the_next_version_on_both_nodes(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        before = one.store.newest(GROUP).vector
        deliveries = [
            await one.submitter.deliver(submission(one, 1.0, tokens=16), ranked(world), world.records),
            await two.submitter.deliver(submission(two, 2.5, tokens=8), ranked(world), world.records),
        ]
        assert all(item is not None for item in deliveries)
        for peer, delivery in zip((one, two), deliveries, strict=True):
            assert delivery is not None
            assert delivery.receipt.verdict is Verdict.ACCEPTED
            assert delivery.aggregator == ranked(world)[0]
            await peer.submitter.await_manifest(delivery, 10)
        # Every live replica was heard, so the round closes long before τ.
        await until(lambda: one.store.newest(GROUP).version == two.store.newest(GROUP).version == 1)
        assert one.store.newest(GROUP).digest == two.store.newest(GROUP).digest
        mean = (16 * 1.0 + 8 * 2.5) / 24
        assert np.allclose(one.store.newest(GROUP).vector, before + mean, atol=1e-3)
        leader = one if one.id == ranked(world)[0] else two
        assert (leader.collector.led, one.collector.led + two.collector.led) == (1, 1)
        author, manifest = Manifest.unseal(world.manifests[GROUP][leader.id])
        assert author == leader.id
        assert (manifest.version, manifest.accepted, manifest.rank) == (1, 2, 0)


async def test_what_a_thread_works_on_is_no_part_of_the_collection(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers are judged meanwhile, and a collection that changes under a thread would end the node."""
    threads: dict[str, set[bool]] = {}
    changing = (
        "header",
        "payload",
        "expect",
        "withdraw",
        "close",
        "outcomes",
        "also",
        "waiting_for",
        "steps",
    )
    for name in changing:
        method = getattr(Collection, name)

        def noted(*arguments: Any, name: str = name, method: Any = method) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread() is threading.main_thread())
            return method(*arguments)

        monkeypatch.setattr(Collection, name, noted)
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        for peer in (one, two):
            assert await peer.submitter.deliver(submission(peer, 1.0), ranked(world), world.records)
        await until(lambda: 1 in {peer.store.newest(GROUP).version for peer in (one, two)})
    assert threads.keys() >= {"header", "payload", "close", "outcomes", "waiting_for"}
    assert all(found == {True} for found in threads.values()), threads


async def test_who_is_cancelled_waits_for_the_thread() -> None:
    began, may_end = threading.Event(), threading.Event()
    done = []

    def work(what: str) -> str:
        began.set()
        may_end.wait(10)
        done.append(what)
        return what

    task = asyncio.create_task(to_its_end(work, "added"))
    await until(began.is_set)
    for _ in range(2):  # impatience changes nothing
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["added"]
    assert await to_its_end(work, what="again") == "again"
    with pytest.raises(ZeroDivisionError):
        await to_its_end(lambda: 1 / 0)


async def test_the_round_closes_at_the_deadline_and_what_comes_later_is_late(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        leader, other = (one, two) if one.id == ranked(world)[0] else (two, one)
        delivery = await leader.submitter.deliver(submission(leader, 1.0), ranked(world), world.records)
        assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED
        late = submission(other, 1.0)
        assert leader.store.newest(GROUP).version == 0
        world.clock.now = 80.0  # τ of round 0
        answer = await other.submitter.deliver(late, ranked(world), world.records)
        assert answer is not None
        assert (answer.receipt.verdict, answer.receipt.reason) == (Verdict.LATE, Reason.AFTER_DEADLINE)
        await until(lambda: leader.store.newest(GROUP).version == 1)
        manifest = leader.store.newest(GROUP).manifest
        assert manifest is not None
        assert [update.verdict for update in manifest.updates if update.peer == leader.id] == ["accepted"]
        # It takes part in the next round.
        await other.sync.sync(GROUP)
        world.clock.now = 110.0
        again = await other.submitter.deliver(submission(other, 1.0, 1), ranked(world, 1), world.records)
        assert again is not None and again.receipt.verdict is Verdict.ACCEPTED


async def test_what_makes_the_model_worse_is_refused_and_dropped(world: World, tmp_path: Path) -> None:
    world.run = world.run.model_copy(
        update={"round": world.run.round.model_copy(update={"screen": 0.5, "compression": "float32"})}
    )
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        leader, other = (one, two) if one.id == ranked(world)[0] else (two, one)
        leader.screening.found = 0.6
        bad = submission(other, 1.0)
        answer = await other.submitter.deliver(bad, ranked(world), world.records)
        assert answer is not None
        assert (answer.receipt.verdict, answer.receipt.reason) == (Verdict.REFUSED, Reason.WORSE)
        assert [(header.digest, payload, scale) for header, payload, scale in leader.screening.asked] == [
            (bad.header.digest, bad.payload, 1.0)
        ]
        leader.screening.found = 0.4
        own = await leader.submitter.deliver(submission(leader, 2.0), ranked(world), world.records)
        assert own is not None and own.receipt.verdict is Verdict.ACCEPTED
        assert len(leader.screening.asked) == 2, "its own update is tried like any other"
        await until(lambda: leader.store.newest(GROUP).version == 1)
        manifest = leader.store.newest(GROUP).manifest
        assert manifest is not None
        outcomes = {update.peer: (update.verdict, update.reason) for update in manifest.updates}
        assert outcomes[other.id] == (Verdict.REFUSED, Reason.WORSE)


async def test_no_update_is_tried_unless_the_run_says_so(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0,)) as (one,):
        one.screening.found = 100.0
        answer = await one.submitter.deliver(submission(one, 1.0), [one.id], world.records)
        assert answer is not None and answer.receipt.verdict is Verdict.ACCEPTED
        assert one.screening.asked == []


async def test_an_aggregator_that_is_gone_is_skipped_for_the_next(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        first, second, *_ = ranked(world)
        by_id = {peer.id: peer for peer in members}
        await by_id[first].server.stop()
        author = next(peer for peer in members if peer.id not in (first, second))
        delivery = await author.submitter.deliver(submission(author, 1.0), ranked(world), world.records)
        assert delivery is not None
        assert (delivery.aggregator, delivery.receipt.verdict) == (second, Verdict.ACCEPTED)
        await author.submitter.await_manifest(delivery, 0)


async def test_the_owner_of_another_block_is_refused(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 1)) as (one, other):
        delivery = await other.submitter.deliver(submission(other, 1.0), [one.id], world.records)
        assert delivery is not None
        assert delivery.receipt.reason is Reason.NOT_ELIGIBLE
        shared = submission(other, 1.0, group="interface")
        delivery = await other.submitter.deliver(shared, [one.id], world.records)
        assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED


async def test_a_newcomer_is_looked_up_before_it_is_refused(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0,)) as (one,):
        await one.submitter.deliver(submission(one, 1.0, round=0), [one.id], world.records)
        world.clock.now = 110.0
        async with peers(world, tmp_path / "new", (0,)) as (new,):
            await until(lambda: GROUP in world.manifests)
            await new.sync.sync(GROUP)
            delivery = await new.submitter.deliver(submission(new, 1.0, 1), [one.id], world.records)
            assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED


async def test_an_update_that_is_not_finite_is_refused_and_the_version_stands(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0,)) as (one,):
        good = submission(one, 1.0)
        bad = np.full(good.header.elements, np.nan, dtype="<f2").tobytes()
        header = good.header.model_copy(update={"digest": payload_digest(bad)})
        delivery = await one.submitter.deliver(Submission(header, bad), [one.id], world.records)
        assert delivery is not None
        assert delivery.receipt.reason is Reason.NOT_FINITE
        world.clock.now = 85.0
        await one.submitter.deliver(submission(one, 1.0, round=0), [one.id], world.records)
        assert one.store.newest(GROUP).version == 0
        assert GROUP not in world.manifests


async def test_a_joiner_takes_the_version_from_a_holder_even_when_no_manifest_is_announced(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0, 1)) as (one, joiner):
        delivery = await one.submitter.deliver(submission(one, 1.0), [one.id], world.records)
        assert delivery is not None
        await until(lambda: one.store.newest(GROUP).version == 1)
        world.manifests.clear()  # they expire when a swarm sleeps
        one.announce()
        held = await joiner.sync.sync(GROUP)
        assert (held.version, held.digest) == (1, one.store.newest(GROUP).digest)


def version(world: World, number: int, signer: Peer, learnt: float = 1.0, group: str = GROUP) -> Held:
    """Version ``number`` of a group, as ``signer`` made it of the one before; ``learnt`` in every round."""

    def vector(number: int) -> Vector:
        return initial_vector(world.run, group) + np.float32(learnt * number)

    norm = float(np.linalg.norm(vector(1) - vector(0)))
    outcome = UpdateOutcome(peer=signer.id, digest=bytes(32), tokens=8, norm=norm, verdict=Verdict.ACCEPTED)
    manifest = Manifest(
        run=world.run.run_id, group=group, round=number - 1, version=number,
        parent=vector_digest(vector(number - 1)), digest=vector_digest(vector(number)),
        elements=len(vector(0)), rank=0, steps=number, total=number, updates=[outcome],
    )  # fmt: skip
    return Held.of(group, number, vector(number), manifest.seal(signer.client.identity.key))


async def test_a_joiner_takes_older_versions_from_a_holder_too(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 1)) as (one, joiner):
        for number in (1, 2, 3):
            one.store.adopt(version(world, number, one))
        one.announce()
        assert (await joiner.sync.sync(GROUP)).version == 3
        older = await joiner.sync.behind(GROUP, 1)
        assert (older.version, older.digest) == (2, version(world, 2, one).digest)
        assert joiner.store.newest(GROUP).version == 3
        del one.store._held[GROUP][1]
        assert (await joiner.sync.behind(GROUP, 2)).version == 2  # nobody has version 1: the nearest to it


async def test_a_manifest_of_a_group_that_is_not_there_is_refused(world: World, tmp_path: Path) -> None:
    """Whoever may aggregate sends manifests, and what its worker is told must not end the worker."""
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 1)) as (one, two):
        made = version(world, 1, one).manifest
        assert made is not None
        sealed = made.model_copy(update={"group": "block-99"}).seal(one.client.identity.key)
        with pytest.raises(WireError, match="unexpected"):
            await two.sync.follow(one.id, sealed)


async def test_an_older_version_is_the_one_that_the_next_was_made_from(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 0, 1)) as (liar, one, joiner):
        for number in (1, 2, 3):
            liar.store.adopt(version(world, number, liar, learnt=5.0))
            one.store.adopt(version(world, number, one))
        newest = one.store.newest(GROUP)
        joiner.store.adopt(newest)
        # The liar is asked first, and a holder that is gone as well.
        gone = one.announced().model_copy(update={"port": 1})
        world.records = {"gone": gone, liar.id: liar.announced(), one.id: one.announced()}
        older = await joiner.sync.behind(GROUP, 1)
        assert (older.version, older.digest) == (2, version(world, 2, one).digest)
        del one.store._held[GROUP][1]
        assert (await joiner.sync.behind(GROUP, 2)).version == 2


async def test_the_first_block_is_served_and_put_together_one_version_back(
    world: World, tmp_path: Path
) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 1)) as (one, client):
        for number in (1, 2, 3):
            one.store.adopt(version(world, number, one))
        one.announce()
        record = Reporter(one.client, one.store, Report(0, "cpu"), one.address).record()
        assert (record.held[0].version, record.serves) == (3, 2)
        vectors, versions = await fetch_model(client.client)
        assert versions == {"block-0": 2, "block-1": 0, "interface": 0}
        np.testing.assert_array_equal(vectors[GROUP], version(world, 2, one).vector)


async def test_version_0_is_asked_of_nobody(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 1)) as (one, joiner):
        joiner.store.adopt(version(world, 1, one))
        joiner.store._held[GROUP].pop(0, None)
        world.records.clear()
        held = await joiner.sync.behind(GROUP, 1)
        assert held.version == 0
        np.testing.assert_array_equal(held.vector, initial_vector(world.run, GROUP))


async def test_everyone_follows_the_same_of_two_manifests_for_one_version(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0, 0, 1)) as (one, two, reader):
        # Each thinks it is alone, and makes a version 1 of its own.
        records = dict(world.records)
        for peer, value in ((one, 1.0), (two, 5.0)):
            world.records.clear()
            world.records[peer.id] = records[peer.id]
            await peer.sync.nodes(fresh=True)
            await peer.submitter.deliver(submission(peer, value), [peer.id], world.records)
            await until(lambda peer=peer: peer.store.newest(GROUP).version == 1)  # type: ignore[misc]
        assert one.store.newest(GROUP).digest != two.store.newest(GROUP).digest
        world.records.update(records)
        one.announce()
        two.announce()
        for peer in (one, two, reader):
            await peer.sync.nodes(fresh=True)
            await peer.sync.sync(GROUP)
        assert len({peer.store.newest(GROUP).digest for peer in (one, two, reader)}) == 1


@pytest.mark.parametrize("tamper", ["signer", "digest"])
async def test_a_manifest_that_is_pushed_must_hold(world: World, tmp_path: Path, tamper: str) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        await one.submitter.deliver(submission(one, 1.0), [one.id], world.records)
        world.clock.now = 80.0
        await one.submitter.deliver(submission(one, 1.0), [one.id], world.records)
        await until(lambda: one.store.newest(GROUP).version == 1)
        sealed = one.store.newest(GROUP).sealed
        if tamper == "signer":
            held = await two.sync.follow(two.id, sealed)
        else:
            manifest = one.store.newest(GROUP).manifest
            assert manifest is not None
            forged = manifest.model_copy(update={"digest": bytes(32)})
            held = await two.sync.follow(two.id, forged.seal(two.client.identity.key))
        assert held.version == 0


async def test_a_version_that_is_not_finite_is_not_followed(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        vector = one.store.newest(GROUP).vector.copy()
        vector[7] = np.inf
        manifest = Manifest(
            run=world.run.run_id, group=GROUP, round=0, version=1,
            parent=one.store.newest(GROUP).digest, total=1,
            digest=vector_digest(vector), elements=len(vector), rank=0, steps=1,
            updates=[
                UpdateOutcome(peer=one.id, digest=bytes(32), tokens=1, norm=1.0, verdict=Verdict.ACCEPTED)
            ],
        )  # fmt: skip
        sealed = manifest.seal(one.client.identity.key)
        one.store.adopt(Held.of(GROUP, 1, vector, sealed))
        await MemoryDirectory(world, one.id).publish_manifest(GROUP, sealed)
        assert (await two.sync.sync(GROUP)).version == 0


async def test_a_dht_that_does_not_answer_does_not_empty_the_swarm(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        assert set(await one.sync.nodes(fresh=True)) == {one.id, two.id}
        world.records.clear()
        assert set(await one.sync.nodes(fresh=True)) == {one.id, two.id}


async def test_readings_of_the_swarm_that_are_asked_for_together_are_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = 0
    read = MemoryDirectory.all_nodes

    async def counted(self: MemoryDirectory, blocks: int) -> object:
        nonlocal readings
        readings += 1
        await asyncio.sleep(0.05)
        return await read(self, blocks)

    monkeypatch.setattr(MemoryDirectory, "all_nodes", counted)
    async with peers(world, tmp_path, (0,)) as (one,):
        await asyncio.gather(*(one.sync.nodes(fresh=True) for _ in range(20)))
        assert readings <= 2


async def test_an_aggregator_that_restarts_makes_no_second_version_of_a_round(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0,)) as (one,):
        await one.submitter.deliver(submission(one, 1.0), [one.id], world.records)
        await until(lambda: one.store.newest(GROUP).version == 1)
        again = Collector(one.client, one.store, one.sync, one.groups, tmp_path, one.screening)
        sent = submission(one, 1.0)  # of the same round, from its version
        receipt = await again.submit(sent.header.seal(one.client.identity.key), sent.payload)
        assert receipt.verdict is Verdict.LATE


async def test_a_clock_that_was_ahead_does_not_keep_a_node_from_collecting(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0,)) as (one,):
        world.clock.now = 3610.0
        await one.submitter.deliver(submission(one, 1.0, round=36), [one.id], world.records)
        world.clock.now = 10.0
        await until(lambda: one.store.newest(GROUP).version == 1)
        delivery = await one.submitter.deliver(submission(one, 1.0, round=1), [one.id], world.records)
        assert delivery is not None
        assert delivery.receipt.verdict is Verdict.ACCEPTED


@pytest.mark.parametrize(("now", "finishes"), [(10.0, False), (77.2, True)])
async def test_who_leaves_finishes_a_round_or_hands_it_over(
    world: World, tmp_path: Path, now: float, finishes: bool
) -> None:
    """The round takes updates until 80: with time left, its workers go to the next in rank at once."""
    world.clock = cast(Any, RunningClock(now))
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        by_name = {peer.id: peer for peer in members}
        leader, successor, worker = (by_name[name] for name in ranked(world))
        sent = submission(worker, 1.0)
        delivery = await worker.submitter.deliver(sent, ranked(world), world.records)
        assert delivery is not None and delivery.aggregator == leader.id
        pushed = asyncio.create_task(worker.submitter.await_manifest(delivery, 60.0))
        async with asyncio.timeout(30):
            await leader.collector.leave(3.0)
            assert await pushed is finishes
        if finishes:
            assert worker.store.newest(GROUP).version == leader.store.newest(GROUP).version == 1
            return
        again = await worker.submitter.deliver(sent, ranked(world), world.records)
        assert again is not None and again.aggregator == successor.id
        assert again.receipt.verdict is Verdict.ACCEPTED
        assert leader.store.newest(GROUP).version == 0


@pytest.mark.parametrize("false", ["update", "round", "group", "run", "signer"])
async def test_a_receipt_that_is_not_the_aggregators_for_this_update_is_none(
    world: World, tmp_path: Path, false: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator that hands out the receipt of another update, round, group or run is skipped."""
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        by_name = {peer.id: peer for peer in members}
        leader, successor, worker = (by_name[name] for name in ranked(world))
        seal = Receipt.seal
        changes = {"update": bytes(32), "round": 7, "group": "interface", "run": "0" * 16}

        def swapped(receipt: Receipt, key: Any) -> bytes:
            if key is not leader.client.identity.key:
                return seal(receipt, key)
            if false == "signer":
                return seal(receipt, successor.client.identity.key)
            return seal(receipt.model_copy(update={false: changes[false]}), key)

        monkeypatch.setattr(Receipt, "seal", swapped)
        delivery = await worker.submitter.deliver(submission(worker, 1.0), ranked(world), world.records)
        assert delivery is not None and delivery.aggregator == successor.id


async def test_an_update_comes_from_its_author(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        replayed = submission(one, 1.0).header.seal(one.client.identity.key)
        link = await two.client.dial(one.address, "round")
        await link.send(Update(header=replayed, hashes=b""))
        with pytest.raises(WireError, match="not-authentic"):
            await link.expect(Proceed, timeout=10)
        await link.close()


async def test_a_manifest_of_a_peer_that_the_run_does_not_allow_is_not_followed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        await one.submitter.deliver(submission(one, 1.0), [one.id], world.records)
        world.clock.now = 80.0
        await until(lambda: one.store.newest(GROUP).version == 1)
        sealed = one.store.newest(GROUP).sealed
        with monkeypatch.context() as patch:
            patch.setattr(RunSpec, "allows", lambda run, peer: peer != one.id)
            assert (await two.sync.follow(one.id, sealed)).version == 0
        assert (await two.sync.follow(one.id, sealed)).version == 1


async def test_replicas_that_the_run_does_not_allow_are_left_out(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [Peer(world, 0, tmp_path / str(number)) for number in range(2)]
    for peer in members:
        peer.announce()

    class MemoryDht:
        async def get(self, key: str) -> dict[str, bytes]:
            return {peer: record.pack() for peer, record in world.records.items()}

    directory = Directory(cast(Any, MemoryDht()), world.run)
    assert set(await directory.nodes(0)) == {peer.id for peer in members}
    monkeypatch.setattr(RunSpec, "allows", lambda run, peer: peer == members[0].id)
    assert set(await directory.nodes(0)) == {members[0].id}
