"""A round of 10,000 workers on ten blocks, uncut and in 16 shards: its time, and the busiest peer's traffic.

    python -m benchmarks.shards

Dry, in the simulator (spheroid_node/simulate/dry.py): headers are signed and judged and manifests made as
ever, updates cost nothing to make, and what counts as moved is the size of the real ones. Each block has
1,000 replicas. A worker that wants a version takes it from the peer that made it, which is more than the
busiest peer of a swarm has to send: there every holder hands it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.report import Found
from spheroid_node.simulate.dry import crowded_run
from spheroid_node.simulate.swarm import Swarm

WORKERS, BLOCKS, SHARDS = 10_000, 10, (1, 16)
ROUNDS = 2
"""The first hands in updates; the second fetches versions before it does."""


def measure(workers: int, blocks: int, shards: int, rounds: int = ROUNDS, seed: int = 0) -> dict[str, Any]:
    """One row: ``rounds`` rounds of a swarm whose blocks are cut into so many shards."""
    began = time.perf_counter()
    swarm = Swarm(crowded_run(blocks, shards), None, workers, seed)
    making, times, reports = time.perf_counter() - began, [], []
    began = time.perf_counter()
    for report in swarm.play(rounds):
        reports.append(report)
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    leaders = {signer for signer, _ in swarm.chosen.values()}
    return {
        "workers": workers,
        "blocks": blocks,
        "shards": shards,
        "rounds": rounds,
        "updates_a_round": reports[-1].expected,
        "participation": min(report.participation for report in reports),
        "aggregators": len(leaders),
        "busiest_peer_mb": round(max(report.busiest_bytes for report in reports) / 1e6, 2),
        "mean_peer_mb": round(2 * (reports[-1].bytes_moved - reports[-2].bytes_moved) / workers / 1e6, 2),
        "seconds_making": round(making, 2),
        "seconds_a_round": round(statistics.median(times), 2),
    }


def found(workers: int = WORKERS, blocks: int = BLOCKS, seed: int = 0) -> Found:
    """A row for each number of shards, and what of them is a headline."""
    rows = [measure(workers, blocks, shards, seed=seed) for shards in SHARDS]
    headline = {}
    for row in rows:
        name = "1shard" if row["shards"] == 1 else f"{row['shards']}shards"
        headline[f"busiest_peer_mb_{name}"] = row["busiest_peer_mb"]
        headline[f"round_s_{name}"] = row["seconds_a_round"]
    return Found(rows, headline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    measured = found(options.workers, options.blocks, options.seed)
    print(json.dumps({"rows": measured.rows, "headline": measured.headline}, indent=1))


if __name__ == "__main__":
    main()
