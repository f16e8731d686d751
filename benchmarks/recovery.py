"""How long a swarm takes to recover: from a killed aggregator, a killed worker, a killed bootstrap.

    python -m benchmarks.recovery --data DATA

Six workers of two blocks, real processes. Again and again the aggregator of a group is killed (SIGKILL) at a
random moment of its round; measured is the time until a live replica has the next version of that group, and
until the killed worker, started again on its state directory, has trained. The moments are drawn from a seed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arms import unpack
from benchmarks.local_swarm import LocalSwarm, events, local_swarm, stamp, wait_for
from benchmarks.report import write_result
from spheroid_node.cli.demo.processes import Child
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import DataSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec, block_group

WORKERS, BLOCKS = 6, 2
PATIENCE = 120.0


def small_run() -> RunSpec:
    return RunSpec(
        name="recovery",
        model=ModelSpec(blocks=BLOCKS, layers=1, width=32, heads=2, window=32),
        training=TrainingSpec(local_steps=200, batch=4),
        round=RoundSpec(genesis=float(int(time.time())), period=8.0, settle=2.5),
        data=DataSpec(name="wikitext-2"),
    )


def newest(children: Mapping[str, Child], group: str) -> int:
    """The newest version of ``group`` that one of these has."""
    versions = [
        event["version"]
        for child in children.values()
        for event in events(child, "round.version")
        if event["group"] == group
    ]
    return max(versions, default=0)  # type: ignore[type-var, return-value]


def _has_versions(swarm: LocalSwarm, group: str) -> bool:
    return newest(swarm.workers, group) > 1


def kill_aggregator(swarm: LocalSwarm, text: list[str], rng: random.Random) -> dict[str, Any]:
    """One kill, and what came of it; the swarm is whole again when this returns."""
    slots, block = Slots.of(swarm.run.round), rng.randrange(BLOCKS)
    group = block_group(block)
    peers = {
        str(events(child, "node.started")[-1]["peer"]): name
        for name, child in swarm.workers.items()
        if int(name.rpartition("-")[2]) % BLOCKS == block
    }
    round = slots.round_at(time.time()) + 1
    name = peers[ranking(swarm.run.run_id, group, round, peers)[0]]
    phase = rng.uniform(0, swarm.run.round.period)
    time.sleep(max(0.0, slots.start(round) + phase - time.time()))
    others = {other: child for other, child in swarm.workers.items() if other != name}
    before, killed = newest(others, group), time.time()
    swarm.workers[name].process.kill()
    swarm.workers[name].process.wait()
    wait_for("the next version", lambda: newest(others, group) > before, PATIENCE)
    seen = min(
        stamp(event)
        for child in others.values()
        for event in events(child, "round.version")
        if event["group"] == group and event["version"] > before  # type: ignore[operator]
    )
    again = time.time()
    swarm.join(block, name, text)

    def trained() -> bool:
        return any(stamp(event) > again for event in events(swarm.workers[name], "round.receipt"))

    wait_for("the worker's next update", trained, PATIENCE)
    back = min(stamp(event) for event in events(swarm.workers[name], "round.trained") if stamp(event) > again)
    return {
        "group": group, "round": round, "phase_s": round_to(phase), "next_version_s": round_to(seen - killed),
        "trains_again_s": round_to(back - again),
    }  # fmt: skip


def round_to(seconds: float) -> float:
    return round(seconds, 2)


def kill_bootstrap(swarm: LocalSwarm, text: list[str]) -> float:
    """Seconds until a new node is there, entering by a second bootstrap while the first is dead."""
    first = swarm.bootstrap
    swarm.address = swarm.start_bootstrap("bootstrap-2", "--peer", swarm.address)
    first.process.kill()
    first.process.wait()
    began = time.time()
    child = swarm.join(0, f"late-{WORKERS}", text)
    wait_for("a node that enters by the second bootstrap", lambda: events(child, "node.started"), PATIENCE)
    return time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="wikitext-2.tar.xz, or a folder with its files")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, rows = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OMP_NUM_THREADS": "1", "SPHEROID_RUNTIME_DIR": f"{folder}/runtime"}
        data = unpack(Path(asked.data), Path(folder))
        text = ["--data", str(data / "test.txt"), "--held-out", str(data / "valid.txt")]
        with local_swarm(Path(folder) / "swarm", small_run()) as swarm:
            for number in range(WORKERS):
                swarm.join(number % BLOCKS, f"worker-{number}", text)
            for group in map(block_group, range(BLOCKS)):
                wait_for("the first versions", partial(_has_versions, swarm, group), PATIENCE)
            for _ in range(asked.kills):
                rows.append(kill_aggregator(swarm, text, rng))
                print(rows[-1], flush=True)
            bootstrap = kill_bootstrap(swarm, text)
    found = {name: [row[name] for row in rows] for name in ("next_version_s", "trains_again_s")}
    headline = {
        "aggregator_median_s": round_to(statistics.median(found["next_version_s"])),
        "aggregator_worst_s": round_to(max(found["next_version_s"])),
        "worker_median_s": round_to(statistics.median(found["trains_again_s"])),
        "worker_worst_s": round_to(max(found["trains_again_s"])),
        "bootstrap_s": round_to(bootstrap),
    }
    print(headline, write_result("recovery", [asked.seed], rows, headline))


if __name__ == "__main__":
    main()
