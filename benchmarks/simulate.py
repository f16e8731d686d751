"""What the round alone costs in the simulator: `simulate --dry` with 100, 1,000 and 10,000 workers.

    python -m benchmarks.simulate

Writes results/simulate.json. Each command is a process of its own on one thread, timed from its start to its
end, imports and all. What making the swarm and what a round costs is then measured in this process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.report import write_result
from spheroid_node.simulate.dry import wide_run
from spheroid_node.simulate.regime import load_regime
from spheroid_node.simulate.swarm import Swarm

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--regime", default="lockstep")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for workers in arguments.workers:
        rows.append(measure(workers, arguments.regime, arguments.seed))
        print(json.dumps(rows[-1]), flush=True)
    headline = {f"workers_{row['workers']}_s": row["seconds"] for row in rows}
    print(write_result("simulate", [arguments.seed], rows, headline))


def measure(workers: int, regime: str, seed: int) -> dict[str, Any]:
    seconds, summary = simulate(workers, regime, seed)
    making, a_round = inside(workers, regime, seed)
    return {
        "workers": workers,
        "regime": regime,
        "rounds": ROUNDS,
        "seconds": round(seconds, 2),
        "seconds_making": round(making, 2),
        "seconds_a_round": round(a_round, 2),
        "updates_a_round": summary["rounds"][-1]["expected"],
        "participation": summary["participation"],
        "bytes_moved": summary["bytes_moved"],
        "virtual_seconds": summary["virtual_seconds"],
        "digest": summary["digest"],
    }


def simulate(workers: int, regime: str, seed: int) -> tuple[float, dict[str, Any]]:
    """Wall-clock seconds of the command, and what it printed."""
    options = ["--workers", workers, "--rounds", ROUNDS, "--regime", regime, "--seed", seed]
    command = [sys.executable, "-m", "spheroid_node", "simulate", "--dry", "--json", *map(str, options)]
    began = time.perf_counter()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return time.perf_counter() - began, json.loads(done.stdout)


def inside(workers: int, regime: str, seed: int) -> tuple[float, float]:
    """Seconds to make the same swarm, and the median of a round."""
    times = [time.perf_counter()]
    swarm = Swarm(wide_run(workers), None, workers, seed, load_regime(regime))
    times.append(time.perf_counter())
    for _ in swarm.play(ROUNDS):
        times.append(time.perf_counter())
    making, *rounds = (after - before for before, after in itertools.pairwise(times))
    return making, statistics.median(rounds)


if __name__ == "__main__":
    main()
