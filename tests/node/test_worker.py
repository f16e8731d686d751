"""A worker's rounds with a trainer that answers at once, on a clock that runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from spheroid_node.errors import DataMissing, TrainerFailed
from spheroid_node.model.parameters import elements
from spheroid_node.node.outbox import Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.submitting import Delivery
from spheroid_node.node.worker import Worker
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RunSpec
from spheroid_node.training.trainer_protocol import Evaluate, Load, Save, Take, Train
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, Message, Receipt

from .conftest import Peer, World

PERIOD, SETTLE = 2.0, 0.6


class RunningClock:
    now = 0.0

    def time(self) -> float:
        return time.time()


class EagerTrainer:
    """Reaches the run's limit of steps in no time; fails when it is told to."""

    def __init__(self, run: RunSpec, groups: tuple[str, ...]) -> None:
        self._run, self._groups = run, groups
        self.fails_at: set[int] = set()
        self.dies = True
        self.errors: dict[type[Message] | str, list[Exception]] = {}
        """What the next requests of a kind, and the next starts, raise."""
        self.spoilt_rounds: set[int] = set()
        self.step_seconds = 0.001
        self.starts = 0
        self.is_running = True
        self.loaded: list[tuple[str, int]] = []
        self.loads: list[Load] = []
        self.rounds: list[int] = []

    async def start(self) -> None:
        self.starts += 1
        if self.errors.get("start"):
            raise self.errors["start"].pop()
        self.is_running = True

    async def request(self, request: Message, timeout: float) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.errors.get(type(request)):
            raise self.errors[type(request)].pop()
        if isinstance(request, Load):
            self.loaded.append((request.group, request.version))
            self.loads.append(request)
        if isinstance(request, Evaluate):
            return {"ce": [2.5]}
        if isinstance(request, Train):
            return {
                "steps": 4, "tokens": 32, "seconds": 0.01, "loss": 2.0, "step_seconds": self.step_seconds,
                "upstream_seconds": 0.0,
            }  # fmt: skip
        if isinstance(request, Take):
            self.rounds.append(Slots.of(self._run.round).round_at(time.time()))
            if self.rounds[-1] - self.rounds[0] in self.fails_at:
                self.fails_at.clear()
                self.is_running = not self.dies
                raise TrainerFailed("it failed when asked for its updates")
            value = np.nan if self.rounds[-1] - self.rounds[0] in self.spoilt_rounds else 0.5
            updates = {g: np.full(elements(self._run, g), value, "<f4").tobytes() for g in self._groups}
            return {"updates": updates}
        return {}


@pytest.fixture
def quick(run: RunSpec) -> World:
    timing = {"genesis": time.time(), "period": PERIOD, "settle": SETTLE}
    world = World(run.model_copy(update={"round": run.round.model_copy(update=timing)}))
    world.clock = cast(Any, RunningClock())
    return world


async def worked(
    world: World,
    tmp_path: Path,
    fails_at: set[int],
    versions: int,
    dies: bool = True,
    group: str = "block-0",
    **more: Any,
) -> Any:
    """Run one worker until a group of its has that many versions; what it did."""
    peer = Peer(world, 0, tmp_path)
    trainer = EagerTrainer(world.run, peer.groups)
    trainer.fails_at, trainer.dies = fails_at, dies
    for name, value in more.items():
        setattr(trainer, name, value)
    report = Report(0, "cpu")
    outbox = Outbox(world.run, tmp_path / "outbox")
    worker = Worker(peer.client, 0, peer.store, peer.sync, peer.submitter, cast(Any, trainer), report, outbox)
    await peer.start()
    seen: list[tuple[float, Manifest]] = []
    tasks = [asyncio.create_task(work) for work in (peer.collector.run(), worker.run())]
    try:
        async with asyncio.timeout(30):
            while peer.store.newest(group).version < versions:
                newest = peer.store.newest(group).manifest
                if newest is not None and newest not in [manifest for _, manifest in seen]:
                    seen.append((time.time(), newest))
                assert not any(task.done() for task in tasks), tasks
                await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await peer.server.stop()
    return trainer, report, seen


@pytest.mark.parametrize("request_type", [Evaluate, Train])
async def test_a_clock_that_is_put_right_keeps_nobody_from_training(
    quick: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_type: type
) -> None:
    """It is far ahead for a moment, as a clock that was behind and has not been measured anew."""
    ahead, saves, answer = [0.0], [0], EagerTrainer.request
    world_clock = SimpleNamespace(time=lambda: time.time() + ahead[0], now=0.0)
    quick.clock = cast(Any, world_clock)

    async def request(self: EagerTrainer, message: Message, timeout: float) -> dict[str, Any]:
        if isinstance(message, Save):
            saves[0] += 1
            ahead[0] = 600.0 if saves[0] == 1 else 0.0
        elif isinstance(message, request_type):
            ahead[0] = 0.0
        return await answer(self, message, timeout)

    monkeypatch.setattr(EagerTrainer, "request", request)
    await worked(quick, tmp_path, set(), 3)
    assert saves[0] >= 2


async def test_a_worker_that_is_done_early_waits_for_its_slot(quick: World, tmp_path: Path) -> None:
    with capture_logs() as logs:
        trainer, report, seen = await worked(quick, tmp_path, set(), 5)
    slots = Slots.of(quick.run.round)
    assert all(slots.start(manifest.round) <= at for at, manifest in seen)
    receipts = [entry for entry in logs if entry["event"] == "round.receipt"]
    assert {entry["verdict"] for entry in receipts} == {"accepted"}
    rounds = [manifest.round for _, manifest in seen]
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds))), "a version in every round"
    assert ("block-0", 3) in trainer.loaded and ("interface", 3) in trainer.loaded
    assert report.verdicts[Verdict.ACCEPTED] >= 8
    # A new trainer has learnt nothing yet; afterwards what it learnt meanwhile goes on top of each version.
    own = [load for load in trainer.loads if load.group in ("block-0", "interface")]
    assert [load.carry for load in own] == [False] * 2 + [True] * (len(own) - 2)
    sizes = {group: 4 * elements(quick.run, group) for group in ("block-0", "interface")}
    assert all(len(load.left_over) == sizes[load.group] for load in own)
    found = (report.tokens_per_second, report.train_loss, report.from_noise_ce)
    assert found == pytest.approx((3200.0, 2.0, 2.5))


@pytest.mark.parametrize("dies", [True, False])
async def test_a_trainer_that_fails_costs_a_round_at_most(
    quick: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr("spheroid_node.node.worker.RESTART_SECONDS", 0.01)
    trainer, _, seen = await worked(quick, tmp_path, {2}, 5, dies)
    assert trainer.starts == dies, "one that still answers is not started again"
    own = [load.carry for load in trainer.loads if load.group == "block-0"]
    assert own.count(False) == 2, "what a trainer that failed has learnt is not carried on"
    rounds = [manifest.round for _, manifest in seen]
    assert rounds[-1] > trainer.rounds[0] + 2
    assert len(range(rounds[0], rounds[-1] + 1)) - len(rounds) <= 1


async def test_an_update_that_is_not_finite_is_never_submitted(
    quick: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spheroid_node.node.worker.RESTART_SECONDS", 0.01)
    with capture_logs() as logs:
        trainer, _, seen = await worked(quick, tmp_path, set(), 3, spoilt_rounds={1})
    assert trainer.rounds[0] + 1 not in [manifest.round for _, manifest in seen]
    receipts = [entry for entry in logs if entry["event"] == "round.receipt"]
    assert {entry["verdict"] for entry in receipts} == {"accepted"}


async def test_a_trainer_that_cannot_start_is_tried_again(
    quick: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spheroid_node.node.worker.RESTART_SECONDS", 0.01)
    monkeypatch.setattr("spheroid_node.node.worker.PAUSE_SECONDS", 0.01)
    away: list[Exception] = [OSError("no memory"), DataMissing("text", "it is away")]
    errors = {"start": away, Load: [TrainerFailed("it is dead")] * 5}
    trainer, report, _ = await worked(quick, tmp_path, set(), 2, errors=errors)
    assert trainer.starts >= 3
    assert report.note == ""


async def test_moments_that_cannot_be_saved_cost_nothing_now(quick: World, tmp_path: Path) -> None:
    errors = {Save: [TrainerFailed("no space left")] * 2}
    with capture_logs() as logs:
        trainer, _, seen = await worked(quick, tmp_path, set(), 3, errors=errors)
    assert trainer.starts == 0
    assert [event["event"] for event in logs].count("trainer.not_saved") == 1, "told once"
    rounds = [manifest.round for _, manifest in seen]
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds)))


async def test_a_machine_that_cannot_keep_up_is_told_so_until_it_can(quick: World, tmp_path: Path) -> None:
    with capture_logs() as logs:
        _, report, _ = await worked(quick, tmp_path, set(), 2, step_seconds=5.0)
    told = [entry for entry in logs if entry["event"] == "round.too_slow"]
    assert told and told[-1]["needed_seconds"] > 5 and "longer period" in told[-1]["remedy"]
    assert told[-1]["available_seconds"] == pytest.approx(PERIOD - SETTLE)
    assert report.note.startswith("too slow: needs"), "also after an update that was accepted"


@pytest.fixture
def idle(world: World, tmp_path: Path) -> Worker:
    """A worker whose rounds a test plays itself; nobody takes its updates."""
    peer = Peer(world, 0, tmp_path)

    class Nobody:
        async def deliver(self, *_: Any) -> None:
            await asyncio.sleep(0.05)

    trainer, nobody = cast(Any, EagerTrainer(world.run, peer.groups)), cast(Any, Nobody())
    outbox = Outbox(world.run, tmp_path / "outbox")
    return Worker(peer.client, 0, peer.store, peer.sync, nobody, trainer, Report(0, "cpu"), outbox)


def late(run: RunSpec) -> dict[str, Delivery | None]:
    receipt = Receipt(run=run.run_id, group="block-0", round=0, update=bytes(32), verdict=Verdict.LATE)
    return {"block-0": Delivery("somebody", receipt, None, 0.1)}


def test_a_note_of_slowness_stands_before_one_of_lateness(idle: Worker, world: World) -> None:
    idle._note_lateness(late(world.run))
    assert idle._report.note == ""
    idle._note_lateness(late(world.run))
    assert idle._report.note == "late in 2 rounds in a row"
    idle._pace.upload_seconds = 60.0
    idle._note_lateness(late(world.run))
    assert idle._report.note == "too slow: needs 120 s, a round leaves 80 s"
    idle._note_lateness({"block-0": None})
    assert idle._report.note.startswith("too slow")
    idle._pace.upload_seconds = 1.0
    idle._note_lateness({"block-0": None})
    assert idle._report.note == ""


async def test_an_update_that_nobody_takes_is_told_and_counts_as_a_slow_upload(
    idle: Worker, world: World
) -> None:
    idle._pace.upload_seconds = 0.0
    base = Base(0, idle._store.newest("block-0").digest)
    update = np.ones(elements(world.run, "block-0"), np.float32)
    submission = idle._contributors["block-0"].prepare(0, base, update, 1, 16, bytes(16))
    with capture_logs() as logs:
        assert await idle._hand_in(0, {"block-0": submission}) == {"block-0": None}
    told = [entry for entry in logs if entry["event"] == "round.not_delivered"]
    assert [(entry["round"], entry["group"]) for entry in told] == [(0, "block-0")]
    assert told[0]["seconds"] > 0 and "network" in told[0]["remedy"]
    assert idle._pace.upload_seconds >= 0.04
