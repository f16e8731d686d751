"""A swarm through hours of trouble: do memory, open files and disk use of its processes stay flat?

    python -m benchmarks.soak --data DATA --minutes 120 --seed 0

Six workers of two blocks and two bootstraps, real processes; once a minute one of them, its trainer or its
libp2p daemon is killed or stopped, drawn from the seed, and started again. About every 15 seconds the
resident memory, its proportional share (PSS) and the open descriptors of every process are sampled, and the
disk use of every state directory.

Growth is that of a process, from its warm-up to its end: a process that was started again is another one.
Of every process that lived for at least LONG of the run, its first WARM_UP of that life is left out; the
median of the last quarter of the rest is compared with the median of its first quarter.
``rss_growth_ratio`` is the largest quotient of these two that any process had, ``fd_growth`` the largest
difference. A stopped process is sampled like any other. ``disk_mb`` is the most that a state directory held
in the last quarter of the run, and ``disk_growth_ratio`` the quotient of the largest one's medians in the
last quarter and in the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.arms import RAW, unpack
from benchmarks.faults import KILLS_AND_STOPS, Fault, Storm, by_kind, environment, schedule
from benchmarks.faulty_swarm import FaultySwarm, faulty_swarm, small_run
from benchmarks.report import RESULTS, write_result

SAMPLE_SECONDS = 15.0
LONG = 0.2
"""Share of the run that a process must have lived for its growth to count."""
WARM_UP = 0.2
"""Share of a life in which a process may still grow: caches fill, libraries are loaded."""
ROLES = ("worker", "trainer", "worker's p2pd", "bootstrap", "bootstrap's p2pd")


@dataclass
class Life:
    """One process from its start to its end, as it was sampled."""

    node: str
    role: str
    seconds: list[float] = field(default_factory=list)
    """Since the run began."""
    rss_mb: list[float] = field(default_factory=list)
    pss_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        return self.seconds[-1] - self.seconds[0]


@dataclass
class Samples:
    """All that was seen."""

    lives: dict[tuple[int, float], Life] = field(default_factory=dict)
    """By process id and time of start."""
    disk_seconds: list[float] = field(default_factory=list)
    disk_mb: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, hurt: FaultySwarm, seconds: float) -> None:
        """One sample of everything."""
        for name in hurt.children:
            for process in hurt.tree(name):
                with suppress(psutil.Error):
                    self._take_process(hurt, name, process, seconds)
        self.disk_seconds.append(round(seconds, 1))
        for name in hurt.children:
            self.disk_mb[name].append(round(disk_mb(hurt.folder / name), 3))

    def _take_process(self, hurt: FaultySwarm, name: str, process: psutil.Process, seconds: float) -> None:
        memory, descriptors = process.memory_full_info(), process.num_fds()
        key = process.pid, process.create_time()
        life = self.lives.get(key)
        if life is None:
            life = self.lives[key] = Life(name, role(hurt, name, process))
        life.seconds.append(round(seconds, 1))
        life.rss_mb.append(round(memory.rss / 1e6, 2))
        life.pss_mb.append(round(memory.pss / 1e6, 2))
        life.descriptors.append(descriptors)


def role(hurt: FaultySwarm, name: str, process: psutil.Process) -> str:
    """What a process is to its node."""
    kind = "bootstrap" if name in hurt.bootstraps else "worker"
    if process.pid == hurt.children[name].process.pid:
        return kind
    if process == hurt.daemon(name):
        return f"{kind}'s p2pd"
    return "trainer" if process == hurt.trainer(name) else "other"


def disk_mb(folder: Path) -> float:
    """Of all files below ``folder``, in MB (10⁶ bytes) of blocks that they occupy."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += 512 * path.lstat().st_blocks
    return total / 1e6


def quarters(values: Sequence[float], warm_up: float = WARM_UP) -> tuple[float, float]:
    """Medians of the first and of the last quarter of what comes after the warm-up."""
    settled = values[int(warm_up * len(values)) :]
    quarter = max(1, len(settled) // 4)
    return statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])


def long_lives(samples: Samples, run_seconds: float) -> list[Life]:
    """Of those with at least four samples after their warm-up."""
    return [
        life
        for life in samples.lives.values()
        if life.length >= LONG * run_seconds and len(life.seconds) * (1 - WARM_UP) >= 4
    ]


def rows_of(samples: Samples, run_seconds: float) -> list[dict[str, Any]]:
    """A row for every role: how many lives were long enough, and the worst growth among them."""
    rows = []
    for name in ROLES:
        lives = [life for life in long_lives(samples, run_seconds) if life.role == name]
        if not lives:
            continue
        rss = [quarters(life.rss_mb) for life in lives]
        files = [quarters(life.descriptors) for life in lives]
        rows.append(
            {
                "role": name,
                "lives": len(lives),
                "longest_min": round(max(life.length for life in lives) / 60, 1),
                "rss_mb": round(statistics.median(last for _, last in rss), 1),
                "rss_growth_ratio": round(max(last / first for first, last in rss), 4),
                "pss_growth_ratio": round(
                    max(last / first for first, last in (quarters(life.pss_mb) for life in lives)), 4
                ),
                "descriptors": round(statistics.median(last for _, last in files), 1),
                "fd_growth": round(max(last - first for first, last in files), 1),
            }
        )
    return rows


def headline_of(
    samples: Samples, rows: Sequence[dict[str, Any]], faults: Sequence[Fault]
) -> dict[str, float]:
    quarter = max(1, len(samples.disk_seconds) // 4)
    fullest = max(samples.disk_mb.values(), key=lambda used: max(used[-quarter:]))
    return {
        "rss_growth_ratio": max(row["rss_growth_ratio"] for row in rows),
        "fd_growth": max(row["fd_growth"] for row in rows),
        "disk_mb": max(fullest[-quarter:]),
        "disk_growth_ratio": round(
            statistics.median(fullest[-quarter:]) / statistics.median(fullest[quarter : 2 * quarter]), 3
        ),
        "faults": len(faults),
        "unhealed": sum(row["unhealed"] for row in by_kind(faults)),
    }


def draw(path: Path, samples: Samples, faults: Sequence[Fault]) -> None:
    """Every life as a line: memory by role, open files of a node, disk use of a state directory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(9, 10), sharex=True, layout="constrained")
    memory, files, disk = axes
    for number, name in enumerate(ROLES):
        label: str | None = name
        for life in samples.lives.values():
            if life.role == name:
                minutes = [second / 60 for second in life.seconds]
                memory.plot(minutes, life.rss_mb, color=f"C{number}", linewidth=0.9, alpha=0.7, label=label)
                files.plot(minutes, life.descriptors, color=f"C{number}", linewidth=0.9, alpha=0.7)
                label = None
    for name, used in samples.disk_mb.items():
        kind = "C3" if name.startswith("bootstrap") else "C0"
        disk.plot(
            [second / 60 for second in samples.disk_seconds], used, color=kind, linewidth=0.9, alpha=0.7
        )
    for axis, title in zip(
        axes, ("resident memory, MB", "open descriptors", "state directory, MB on disk"), strict=True
    ):
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
        for fault in faults:
            axis.axvline(fault.at / 60, color="black", linewidth=0.5, linestyle=":", alpha=0.4)
    memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    memory.set_title("Every process of a swarm in which something is killed or stopped once a minute")
    disk.set_xlabel("minutes (a dotted line is a fault)")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


async def soak(folder: Path, text: Sequence[str], seed: int, seconds: float) -> tuple[Samples, list[Fault]]:
    """A run of that length, with a fault a minute."""
    samples = Samples()
    folder.mkdir(parents=True)  # noqa: ASYNC240
    async with faulty_swarm(folder, small_run("soak", seed), text) as hurt:
        storm = Storm(hurt, seed, lambda fault: None)
        planned = schedule(seed, KILLS_AND_STOPS, max(1, round(seconds / 60)), seconds)
        playing, began = asyncio.create_task(storm.play(planned)), time.monotonic()
        while (now := time.monotonic() - began) < seconds or not playing.done():
            samples.take(hurt, now)
            await asyncio.sleep(SAMPLE_SECONDS)
        return samples, await playing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="wikitext-2.tar.xz, or a folder with its files")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment(folder)
        data = unpack(Path(asked.data), Path(folder))
        text = ["--data", str(data / "test.txt"), "--held-out", str(data / "valid.txt")]
        samples, faults = asyncio.run(soak(Path(folder) / "swarm", text, asked.seed, 60 * asked.minutes))
    write_raw(RAW / "soak" / f"{asked.seed}.json", samples, faults)
    rows = rows_of(samples, 60 * asked.minutes)
    headline = headline_of(samples, rows, faults)
    draw(RESULTS / "soak.png", samples, faults)
    print(headline, write_result("soak", [asked.seed], rows, headline))


def write_raw(path: Path, samples: Samples, faults: Sequence[Fault]) -> None:
    """One line a process: all its samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pack = partial(json.dumps, separators=(",", ":"))
    lives = ",\n".join(pack(vars(life)) for life in samples.lives.values())
    disk = pack({"seconds": samples.disk_seconds, "mb": samples.disk_mb})
    events = ",\n".join(pack(vars(fault)) for fault in faults)
    path.write_text(f'{{"disk":{disk},\n"faults":[\n{events}],\n"lives":[\n{lives}]}}\n')


if __name__ == "__main__":
    main()
