"""The growth that a soak reports is that of a process, after its warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.faults import Fault
from benchmarks.soak import Life, Samples


def life(role: str, rss: list[float], descriptors: list[int] | None = None) -> Life:
    seconds = [15.0 * number for number in range(len(rss))]
    return Life("worker-0", role, seconds, rss, rss, descriptors or [10] * len(rss))


def samples(*lives: Life) -> Samples:
    return Samples({(number, 0.0): each for number, each in enumerate(lives)})


def test_what_grows_in_its_warm_up_alone_is_flat() -> None:
    warm = [50.0, 80.0] + [100.0] * 18
    (row,) = soak.rows_of(samples(life("worker", warm)), 300.0)
    assert row["rss_growth_ratio"] == 1.0
    assert row["fd_growth"] == 0


def test_what_goes_on_growing_is_seen_for_the_worst_process_alone() -> None:
    leaking = life("trainer", [100.0 + number for number in range(40)], list(range(40)))
    (row,) = soak.rows_of(samples(leaking, life("trainer", [100.0] * 40)), 600.0)
    assert row["rss_growth_ratio"] == pytest.approx(135.5 / 111.5, abs=1e-3)
    assert row["fd_growth"] == 24
    assert row["lives"] == 2


def test_a_new_process_in_the_place_of_one_that_was_killed_is_no_growth() -> None:
    small, large = life("worker", [100.0] * 20), life("worker", [200.0] * 20)
    assert soak.rows_of(samples(small, large), 600.0)[0]["rss_growth_ratio"] == 1.0


def test_a_process_that_lived_briefly_does_not_count() -> None:
    assert soak.rows_of(samples(life("worker", [1.0, 2.0, 3.0])), 600.0) == []


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    taken = samples(life("worker", [100.0] * 20), life("trainer", [300.0] * 20))
    taken.disk_seconds = [15.0 * number for number in range(20)]
    taken.disk_mb["worker-0"] = [2.0] * 20
    soak.draw(tmp_path / "soak.png", taken, [Fault(0, "worker killed", "worker-0", 60.0)])
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    headline = soak.headline_of(taken, soak.rows_of(taken, 300.0), [])
    assert headline["disk_mb"] == 2.0
