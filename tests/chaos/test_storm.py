"""The short form of the storm: six workers and two bootstraps, every kind of fault, and what must hold.

    make storm                                   this file alone, with a line for every fault
    python -m benchmarks.chaos --data DATA --seed 0 --minutes 60 --faults 300

The last is the long form, by hand: it has an undisturbed run before it, whose quality it must come close to,
and writes benchmarks/results/chaos.json. Faults are in benchmarks/faults.py, what must hold in
benchmarks/invariants.py. What is drawn follows from the seed; how the processes meet it does not, so a seed
that failed once may pass the next time: the logs of all nodes are left in pytest's temporary folder.

A full disk needs a user who may mount one, and is skipped for others.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.chaos import Outcome, play
from benchmarks.faults import KINDS, by_kind
from benchmarks.faulty_swarm import small_run

pytestmark = pytest.mark.timeout(1200)

SEED = 0
SECONDS = 60.0
"""Of faults; the swarm's start and the healing of the last ones come on top."""
FAULTS = len(KINDS)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        run = small_run("storm", SEED, data="python-docs")
        return asyncio.run(
            play(folder / "swarm", run, (), seed=SEED, seconds=SECONDS, faults=FAULTS, windows=64)
        )


def test_nothing_that_must_hold_was_broken(outcome: Outcome) -> None:
    assert not outcome.violations, outcome.summary()


def test_the_watch_has_seen_something(outcome: Outcome) -> None:
    assert len(outcome.faults) == FAULTS
    for name in ("version files read", "outboxes read", "answers over the wire", "updates in a version"):
        assert outcome.counts[name] > 20, outcome.counts
    # Of most updates it knows what became of them.
    unknown = outcome.counts.get("updates unknown", 0)
    assert 2 * unknown < outcome.counts["updates in a version"], outcome.counts


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_heals(outcome: Outcome, kind: str) -> None:
    if kind not in outcome.kinds:
        pytest.skip("this user may not mount a small disk")
    rows = {row["kind"]: row for row in by_kind(outcome.faults)}
    assert rows[kind]["count"] >= 1
    assert rows[kind]["unhealed"] == 0, outcome.summary()


def test_the_swarm_has_learnt(outcome: Outcome) -> None:
    """Knowing nothing is ln 256 = 5.545 nats a byte."""
    assert outcome.ce < 4.5
