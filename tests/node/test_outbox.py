"""What a worker learnt outlives it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from spheroid_node.model.parameters import elements
from spheroid_node.node.outbox import Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.worker import Worker
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import shares
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, Receipt

from .conftest import Peer, World
from .test_worker import EagerTrainer, RunningClock

GROUP = "block-0"


def contributor(run: RunSpec) -> Contributor:
    return Contributor(run, GROUP, elements(run, GROUP))


def filled(run: RunSpec, answered: bool = True) -> Contributor:
    """One with something left over, and an update that is open."""
    made = contributor(run)
    update = np.linspace(-1, 1, elements(run, GROUP), dtype=np.float32)
    made.residual.vector = 0.25 * update
    submission = made.prepare(7, Base(4, b"b" * 32), update, 5, 80, b"n" * 16)
    if answered:
        header = submission.header
        made.answered(
            Receipt(
                run=header.run, group=GROUP, round=7, update=header.digest, verdict=Verdict.ACCEPTED
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize("contained", [True, False])
def test_what_was_decided_about_the_update_before_comes_back(
    run: RunSpec, tmp_path: Path, contained: bool
) -> None:
    before, after = filled(run), contributor(run)
    if not contained:
        before.answered(before.kept().receipt.model_copy(update={"verdict": Verdict.LATE}))  # type: ignore[union-attr]
    later = Manifest(
        run=run.run_id, group=GROUP, round=9, version=9, parent=bytes(32), digest=bytes(32), elements=1,
        rank=0, steps=0, total=9, updates=[],
    )  # fmt: skip
    assert before.settle({9: later}) is contained
    Outbox(run, tmp_path).save(GROUP, before.kept(), 9)
    assert Outbox(run, tmp_path).restore(GROUP, after, 9) is None
    assert after.kept().settled == before.kept().settled
    assert [update.contained for update in after.kept().settled] == [contained]


def test_what_the_open_update_carries_comes_back(run: RunSpec, tmp_path: Path) -> None:
    before, after = filled(run), contributor(run)
    for round in (8, 9):
        before.settle({})
        update = np.full(elements(run, GROUP), round, dtype=np.float32)
        before.prepare(round, Base(round - 3, b"b" * 32), update, 5, 80, b"n" * 16)
    Outbox(run, tmp_path).save(GROUP, before.kept(), 9)
    Outbox(run, tmp_path).restore(GROUP, after, 9)
    assert [len(update.parts) for update in after.kept().settled] == [0, 1]
    assert after.kept().parts == before.kept().parts == pytest.approx(shares(before.kept().settled))
    assert sorted(after.kept().parts.values()) == pytest.approx([0.81, 0.9])


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("compression", ["fp16", "int8"])
def test_everything_comes_back(run: RunSpec, tmp_path: Path, answered: bool, compression: str) -> None:
    run = run.model_copy(update={"round": run.round.model_copy(update={"compression": compression})})
    before, after = filled(run, answered), contributor(run)
    Outbox(run, tmp_path).save(GROUP, before.kept(), 7)
    submission = Outbox(run, tmp_path).restore(GROUP, after, 8)
    one, other = before.kept(), after.kept()
    np.testing.assert_array_equal(one.residual, other.residual)
    np.testing.assert_array_equal(one.sent, other.sent)  # type: ignore[arg-type]
    assert (one.submission, one.receipt) == (other.submission, other.receipt)
    assert submission == one.submission and (other.receipt is not None) is answered
    # What is restored can be settled and goes into the next update.
    assert before.settle({}) == after.settle({}) is False
    np.testing.assert_array_equal(before.residual.vector, after.residual.vector)
    Outbox(run, tmp_path).save(GROUP, after.kept(), 8)
    assert Outbox(run, tmp_path).restore(GROUP, contributor(run), 8) is None


def test_nothing_was_saved(run: RunSpec, tmp_path: Path) -> None:
    made = contributor(run)
    assert Outbox(run, tmp_path / "none").restore(GROUP, made, 0) is None
    assert not made.residual.vector.any()


def test_what_is_too_old_is_of_no_use(run: RunSpec, tmp_path: Path) -> None:
    outbox, made = Outbox(run, tmp_path), contributor(run)
    outbox.save(GROUP, filled(run).kept(), 7)
    assert outbox.restore(GROUP, made, 18) is None and not made.residual.vector.any()
    assert outbox.restore(GROUP, made, 17) is not None and made.residual.vector.any()


@pytest.mark.parametrize("damage", ["cut", "garbage", "other run", "other group", "other shape"])
def test_a_file_that_does_not_fit_is_left_aside(run: RunSpec, tmp_path: Path, damage: str) -> None:
    outbox, made = Outbox(run, tmp_path), contributor(run)
    outbox.save(GROUP, filled(run).kept(), 7)
    file = tmp_path / f"{GROUP}.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "garbage":
        file.write_bytes(b"x" * 100)
    elif damage == "other run":
        Outbox(run.model_copy(update={"seed": 99}), tmp_path).save(GROUP, filled(run).kept(), 7)
    elif damage == "other group":
        file.rename(tmp_path / "interface.safetensors")
    else:
        Outbox(run, tmp_path).save(GROUP, Contributor(run, GROUP, 3).kept(), 7)
    group = "interface" if damage == "other group" else GROUP
    with capture_logs() as logs:
        assert outbox.restore(group, made, 8) is None
    assert [entry["event"] for entry in logs] == ["outbox.damaged"]
    assert not made.residual.vector.any()


def test_a_full_disk_costs_nothing_now(run: RunSpec, tmp_path: Path) -> None:
    in_the_way = tmp_path / "outbox"
    in_the_way.write_bytes(b"")
    outbox = Outbox(run, in_the_way)
    with capture_logs() as logs:
        for round in (7, 8, 9):
            outbox.save(GROUP, filled(run).kept(), round)
        in_the_way.unlink()
        outbox.save(GROUP, filled(run).kept(), 10)
    assert [entry["event"] for entry in logs] == ["disk.not_written", "disk.written_again"], "told once"


async def test_an_update_survives_its_worker_within_the_round(run: RunSpec, tmp_path: Path) -> None:
    """The first worker dies with its update on disk, before anybody has it; the second hands it in."""
    timing = {"genesis": time.time(), "period": 8.0, "settle": 3.0}
    world = World(run.model_copy(update={"round": run.round.model_copy(update=timing)}))
    world.clock = cast(Any, RunningClock())
    peer = Peer(world, 0, tmp_path)
    await peer.start()
    collecting = asyncio.create_task(peer.collector.run())
    outbox = Outbox(world.run, tmp_path / "outbox")

    class Nowhere:
        async def deliver(self, *_: Any) -> None:
            await asyncio.Event().wait()

    def worker(submitter: Any) -> tuple[EagerTrainer, asyncio.Task[None]]:
        trainer, report = EagerTrainer(world.run, peer.groups), Report(0, "cpu")
        made = Worker(peer.client, 0, peer.store, peer.sync, submitter, cast(Any, trainer), report, outbox)
        return trainer, asyncio.create_task(made.run())

    def saved() -> Any:
        made = Contributor(world.run, GROUP, elements(world.run, GROUP))
        return (
            outbox.restore(GROUP, made, 0)
            if (tmp_path / "outbox" / f"{GROUP}.safetensors").exists()
            else None
        )

    async with asyncio.timeout(30):
        first, running = worker(Nowhere())
        while (open_update := saved()) is None:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with capture_logs() as logs:
            second, running = worker(peer.submitter)
            while (manifest := peer.store.newest(GROUP).manifest) is None:
                assert not running.done(), running
                await asyncio.sleep(0.01)
        for task in (running, collecting):
            task.cancel()
        await asyncio.gather(running, collecting, return_exceptions=True)
        await peer.server.stop()
    assert manifest.round == open_update.header.round
    assert [update.digest for update in manifest.updates] == [open_update.header.digest]
    assert "round.handed_in_again" in [entry["event"] for entry in logs]
    assert first.rounds == [manifest.round] and manifest.round not in second.rounds
