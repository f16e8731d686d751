"""A storm follows from its seed, and is told of by kind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.faults import KILLS_AND_STOPS, KINDS, Fault, by_kind, schedule
from benchmarks.wrong_clock import wrong_clock


def test_a_schedule_follows_from_its_seed() -> None:
    kinds = list(KINDS)
    planned = schedule(0, kinds, 300, 3600.0)
    assert planned == schedule(0, kinds, 300, 3600.0)
    assert planned != schedule(1, kinds, 300, 3600.0)
    times = [at for at, _ in planned]
    assert times == sorted(times)
    assert times[0] >= 0 and times[-1] < 3600
    counts = Counter(kind for _, kind in planned)
    assert set(counts) == set(kinds)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_kills_and_stops_are_of_every_kind_of_process() -> None:
    named = " ".join(KILLS_AND_STOPS)
    assert all(part in named for part in ("worker", "aggregator", "bootstrap", "p2pd", "trainer"))


def test_a_row_counts_the_faults_that_never_healed() -> None:
    faults = [Fault(0, "link cut", "worker-0", 1.0, 2.0, 3.0), Fault(1, "link cut", "worker-1", 2.0)]
    (row,) = by_kind(faults)
    assert (row["kind"], row["count"], row["unhealed"], row["healed_worst_s"]) == ("link cut", 2, 1, 3.0)


def test_a_clock_can_be_wrong_in_one_process(tmp_path: Path) -> None:
    with wrong_clock(tmp_path / "clock", -600.0):
        said = subprocess.run(
            [sys.executable, "-c", "from time import time; print(time())"], capture_output=True, check=True
        ).stdout
    assert -610 < float(said) - time.time() < -590
