from __future__ import annotations

from math import inf
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from spheroid_node.rounds.slots import Slots
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.regime import LOCKSTEP, REGIMES, Machine, Regime, load_regime
from spheroid_node.simulate.swarm import Swarm, small_run

EXAMPLES = Path(__file__).parents[2] / "bootstrap" / "regimes"


def participation(run: RunSpec, name: str, workers: int, rounds: int = 6) -> tuple[float, list[float]]:
    """Mean over seeds, and of each seed."""
    seeds = [
        fmean(report.participation for report in Swarm(run, None, workers, seed, REGIMES[name]).play(rounds))
        for seed in range(3)
    ]
    return fmean(seeds), seeds


@pytest.mark.parametrize(("name", "expected", "tolerance"), [("mild", 0.90, 0.03), ("wan", 0.42, 0.04)])
def test_participation_is_the_paper_s(name: str, expected: float, tolerance: float) -> None:
    mean, seeds = participation(small_run(), name, workers=36)
    assert mean == pytest.approx(expected, abs=tolerance)
    assert seeds == pytest.approx([expected] * 3, abs=0.08)
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("name", "expected"), [("lockstep", 1.0), ("bad-edge", 0.0)])
@pytest.mark.parametrize("workers", [3, 24])
def test_all_or_nobody(name: str, expected: float, workers: int) -> None:
    assert participation(small_run(), name, workers, rounds=4)[1] == [expected] * 3


def test_at_the_bad_edge_updates_come_but_too_late() -> None:
    swarm = Swarm(small_run(), None, 24, regime=REGIMES["bad-edge"])
    reports = list(swarm.play(6))
    assert sum(report.late for report in reports) > 24
    assert all(version.base.version == 0 for version in swarm.versions.values())


def test_machines_are_drawn_as_the_regime_says() -> None:
    run = small_run()
    regime = Regime(speed=2.0, speed_spread=0.5, latency=0.1, bandwidth=1e6, link_spread=0.8)
    machines = [regime.machine(run, seed=1, index=index) for index in range(2000)]
    slots = Slots.of(run.round)
    fitting = (slots.deadline(0) - slots.start(0)) / run.training.local_steps
    for values, median, spread in (
        ([machine.step_seconds for machine in machines], fitting / 2.0, 0.5),
        ([machine.bytes_per_second for machine in machines], 1e6, 0.8),
        ([machine.latency for machine in machines], 0.1, 0.8),
    ):
        logs = np.log(values)
        assert np.median(logs) == pytest.approx(np.log(median), abs=0.06)
        assert logs.std() == pytest.approx(spread, rel=0.06)
    for machine in machines[:10]:
        assert machine.bytes_per_second * machine.latency == pytest.approx(1e5)
    assert LOCKSTEP.machine(run, 1, 0) == LOCKSTEP.machine(run, 2, 5) == Machine(fitting / 1.5, inf, 0.0)


def test_mishaps_are_drawn_as_the_regime_says() -> None:
    run = small_run()
    regime = Regime(stall=0.3, stall_slots=0.5, stall_spread=0.4, away=0.2)
    mishaps = [regime.mishaps(run, seed=1, round=round, workers=1000) for round in range(4)]
    away = np.concatenate([one.away for one in mishaps])
    seconds = np.concatenate([one.stall_seconds for one in mishaps])
    stalls = np.log(seconds[seconds > 0] / run.round.period)
    assert away.mean() == pytest.approx(0.2, abs=0.02)
    assert (seconds > 0).mean() == pytest.approx(0.3, abs=0.02)
    assert np.exp(np.median(stalls)) == pytest.approx(0.5, abs=0.02)
    assert stalls.std() == pytest.approx(0.4, abs=0.02)
    assert (mishaps[0].away != mishaps[1].away).any()
    assert not LOCKSTEP.mishaps(run, 1, 0, 1000).away.any()
    assert not LOCKSTEP.mishaps(run, 1, 0, 1000).stall_seconds.any()


def test_a_transfer_takes_latency_and_bandwidth() -> None:
    machine = Machine(step_seconds=1.0, bytes_per_second=100.0, latency=0.5)
    assert (machine.transfer_seconds(250), machine.transfer_seconds(0)) == (3.0, 0.0)
    assert machine.steps_between(10.0, 12.5) == 3
    assert machine.steps_between(10.0, 9.0) == 0


def test_a_deadline_moves_tau_and_only_that() -> None:
    run = small_run()
    moved = Regime(deadline=0.25).run_of(run)
    assert Slots.of(moved.round).deadline(0) - Slots.of(moved.round).start(0) == pytest.approx(2.5)
    assert moved.round.model_copy(update={"settle": run.round.settle}) == run.round
    assert LOCKSTEP.run_of(run) == run
    swarm = Swarm(run, None, 3, regime=Regime(deadline=0.25))
    assert [report.steps for report in swarm.play(2)] == [40.0] * 2
    assert swarm.run.round == moved.round


def test_a_link_that_is_too_slow_for_the_updates_makes_them_late() -> None:
    run = RunSpec(
        name="large",
        model=ModelSpec(blocks=2, layers=2, width=64, heads=4, window=32),
        training=TrainingSpec(local_steps=40),
        round=RoundSpec(period=10.0, settle=2.0),
    )
    slow, fast = (
        list(Swarm(run, None, 4, regime=Regime(bandwidth=bandwidth)).play(4)) for bandwidth in (1e4, 1e7)
    )
    assert {report.participation for report in fast} == {1.0}
    # Who collects a group has no link to cross.
    assert 0 < fmean(report.participation for report in slow) < 0.5
    assert sum(report.late for report in slow) >= 4


# --- files ------------------------------------------------------------------------------------------


def test_names_and_files_are_read(tmp_path: Path) -> None:
    assert load_regime("wan") is REGIMES["wan"]
    path = tmp_path / "mine.toml"
    path.write_text("speed_spread = 0.2\nbandwidth = inf\nstall = 0.1\n")
    assert load_regime(str(path)) == Regime(speed_spread=0.2, stall=0.1)


def test_an_unknown_one_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'lan'.*lockstep, mild, wan, bad-edge"):
        load_regime("lan")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("spede = 1", r"spede: Extra inputs"),
        ("stall = 1.5", r"stall: .*less than or equal to 1"),
        ("away = nan", r"away: .*"),
        ("speed = 0", r"speed: .*greater than 0"),
        ("speed = inf", r"speed: .*finite"),
        ("deadline = 1.0", r"deadline: .*less than 1"),
        ("latency = -1", r"latency: .*"),
        ("= 3", r"mine.toml: .*Invalid"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        load_regime(str(path))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml: .*utf-8"):
        load_regime(str(path))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_can_be_played(path: Path) -> None:
    assert 0 < next(Swarm(small_run(), None, 12, regime=load_regime(str(path))).play(1)).participation <= 1


def test_there_is_an_example() -> None:
    assert list(EXAMPLES.glob("*.toml"))
