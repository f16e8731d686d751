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
from spheroid_node.node import outbox as module
from spheroid_node.node.outbox import INDEX_FILE, Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.worker import Worker
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import LENGTH, shares
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, Receipt
from spheroid_node.wire.tensors import encoded_size

from .conftest import Peer, World
from .test_worker import EagerTrainer, RunningClock

GROUP = "block-0"


def contributor(run: RunSpec) -> Contributor:
    return Contributor(run, GROUP, elements(run, GROUP))


def filled(run: RunSpec, answered: bool = True) -> Contributor:
    """One with something left over, and an update that is open."""
    made = contributor(run)
    update = np.linspace(-1, 1, elements(run, GROUP), dtype=np.float32)
    made.prepare(6, Base(3, b"b" * 32), update**2, 5, 80, b"n" * 16)
    made.settle({})
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
    assert after.kept() == before.kept()
    assert [update.contained for update in after.kept().settled] == [False, contained]


def test_what_the_open_update_carries_comes_back(run: RunSpec, tmp_path: Path) -> None:
    before, after = filled(run), contributor(run)
    for round in (8, 9):
        before.settle({})
        update = np.full(elements(run, GROUP), round, dtype=np.float32)
        before.prepare(round, Base(round - 3, b"b" * 32), update, 5, 80, b"n" * 16)
    Outbox(run, tmp_path).save(GROUP, before.kept(), 9)
    Outbox(run, tmp_path).restore(GROUP, after, 9)
    assert [len(update.parts) for update in after.kept().settled] == [0, 1, 2]
    assert after.kept().parts == before.kept().parts == pytest.approx(shares(before.kept().settled))
    assert sorted(after.kept().parts.values()) == pytest.approx([0.729, 0.81, 0.9])


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("compression", ["fp16", "int8"])
def test_everything_comes_back(run: RunSpec, tmp_path: Path, answered: bool, compression: str) -> None:
    run = run.model_copy(update={"round": run.round.model_copy(update={"compression": compression})})
    before, after = filled(run, answered), contributor(run)
    Outbox(run, tmp_path).save(GROUP, before.kept(), 7)
    submission = Outbox(run, tmp_path).restore(GROUP, after, 8)
    assert before.kept() == after.kept() and submission == before.kept().submission
    assert (after.kept().receipt is not None) is answered
    rounded_off = 0.01 if compression == "int8" else 0.001
    np.testing.assert_allclose(before.left_over, after.left_over, atol=rounded_off)
    # What is restored can be settled and goes into the next update.
    assert before.settle({}) == after.settle({}) is False
    np.testing.assert_allclose(before.left_over, after.left_over, atol=rounded_off)
    assert np.abs(after.left_over).max() > 0.5
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


@pytest.mark.parametrize(
    "damage", ["cut", "garbage", "other run", "other group", "other shape", "update gone", "update changed"]
)
def test_a_file_that_does_not_fit_is_left_aside(run: RunSpec, tmp_path: Path, damage: str) -> None:
    outbox, made = Outbox(run, tmp_path), contributor(run)
    outbox.save(GROUP, filled(run).kept(), 7)
    file = tmp_path / GROUP / INDEX_FILE
    update = next((tmp_path / GROUP).glob("*.update"))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "garbage":
        file.write_bytes(b"x" * 100)
    elif damage == "other run":
        Outbox(run.model_copy(update={"seed": 99}), tmp_path).save(GROUP, filled(run).kept(), 7)
    elif damage == "other group":
        (tmp_path / GROUP).rename(tmp_path / "interface")
    elif damage == "update gone":
        update.unlink()
    elif damage == "update changed":
        update.write_bytes(update.read_bytes()[:-1] + b"x")
    else:
        made = Contributor(run, GROUP, 3)
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


def rounds(run: RunSpec, outbox: Outbox, many: int) -> Contributor:
    """A worker that nobody hears, saved whenever something changes."""
    made, random = contributor(run), np.random.default_rng(1)
    for round in range(many):
        update = random.standard_normal(elements(run, GROUP), dtype=np.float32)
        made.prepare(round, Base(round, b"b" * 32), update, 5, 80, b"n" * 16)
        outbox.save(GROUP, made.kept(), round)
        made.settle({})
        outbox.save(GROUP, made.kept(), round)
    return made


def test_an_update_is_written_once_and_removed_when_it_is_forgotten(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = module.write_atomically
    monkeypatch.setattr(
        module, "write_atomically", lambda path, data: (written.append(len(data)), real(path, data))
    )
    rounds(run, Outbox(run, tmp_path), 9)
    assert written == [encoded_size(elements(run, GROUP), "fp16")] * 9
    assert len(list((tmp_path / GROUP).iterdir())) == LENGTH + 1, "those remembered, and the index"


def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write and every removal is the last one once."""

    class Killed(BaseException):
        pass

    old, new = contributor(run), rounds(run, Outbox(run, tmp_path / "other"), 7)
    for moment in range(20):
        outbox = Outbox(run, tmp_path / str(moment))
        old = rounds(run, outbox, 6)
        left = [moment]

        def dying(work: Any, left: list[int] = left) -> Any:
            def one_less(*arguments: Any, **options: Any) -> Any:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return work(*arguments, **options)

            return one_less

        with monkeypatch.context() as patch:
            for name in ("write_atomically", "write_tensors"):
                patch.setattr(module, name, dying(getattr(module, name)))
            patch.setattr(Path, "unlink", dying(Path.unlink))
            try:
                outbox.save(GROUP, new.kept(), 7)
                ended = True
            except Killed:
                ended = False
        after = contributor(run)
        Outbox(run, tmp_path / str(moment)).restore(GROUP, after, 7)
        assert after.kept() in (old.kept(), new.kept())
        Outbox(run, tmp_path / str(moment)).tidy(7)
        assert len(list((tmp_path / str(moment) / GROUP).iterdir())) == LENGTH + 1
        if ended:
            break
    assert moment > 2 and ended and after.kept() == new.kept()


def test_leftovers_and_what_is_too_old_are_removed(run: RunSpec, tmp_path: Path) -> None:
    outbox = Outbox(run, tmp_path)
    outbox.save(GROUP, filled(run).kept(), 7)
    outbox.save("interface", Contributor(run, "interface", 3).kept(), 1)
    kept = set((tmp_path / GROUP).iterdir())
    for left in (tmp_path / GROUP / ".ab.update.x1y2", tmp_path / f"{GROUP}.safetensors"):
        left.write_bytes(b"x")
    outbox.tidy(12)
    assert set(tmp_path.iterdir()) == {tmp_path / GROUP}
    assert set((tmp_path / GROUP).iterdir()) == kept
    Outbox(run, tmp_path / "none").tidy(12)


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
        return outbox.restore(GROUP, made, 0) if (tmp_path / "outbox" / GROUP / INDEX_FILE).exists() else None

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
