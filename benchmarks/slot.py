"""How much of a slot a worker trains, and what training on while updates travel does to the model.

    python -m benchmarks.slot --data ../shared/data/wikitext-2.tar.xz --jobs 2

A slot of 60 seconds, of which 8 are for settling, as a run file has them that says nothing else.

**The share** is measured on real nodes: two workers of a block with the model of wikitext-small, the seconds
in which their trainers made steps against the time between two updates.

**The effect** is measured in the simulator, for the same number of slots with and without: machines that fit
40 steps between the start of a slot and τ, of 50 that the run allows, links of 50 ms and 5 MB/s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, options, play, row, small_run, unpack
from benchmarks.local_swarm import LocalSwarm, events, local_swarm, wait_for
from benchmarks.recovery import stamp
from benchmarks.report import write_result
from spheroid_node.run import DataSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec

SLOTS = 6
REPLICAS = 2
TOKENS = 1_536_000
REGIME = Path(__file__).parent / "busy.toml"


def real_run() -> RunSpec:
    """The shape of bootstrap/runs/wikitext-small.toml, in slots as they are by default."""
    return RunSpec(
        name="slot",
        model=ModelSpec(blocks=1, layers=2, width=128, heads=4, window=128),
        training=TrainingSpec(batch=16),
        round=RoundSpec(genesis=float(int(time.time()))),
        data=DataSpec(name="wikitext-2"),
    )


def shares(swarm: LocalSwarm, name: str) -> list[dict[str, Any]]:
    """Of every update of a worker but the first: seconds since the one before, and of these the trained."""
    trained = events(swarm.workers[name], "round.trained")
    found = []
    for before, after in itertools.pairwise(trained):
        lasted = stamp(after) - stamp(before)
        found.append(
            {
                "table": "share",
                "worker": name,
                "steps": after["steps"],
                "slot_s": round(lasted, 2),
                "trained_s": round(float(str(after["seconds"])), 2),
                "share": round(float(str(after["seconds"])) / lasted, 4),
            }
        )
    return found


def measure_share(data: Path, folder: Path) -> list[dict[str, Any]]:
    os.environ |= {"OMP_NUM_THREADS": "1", "SPHEROID_RUNTIME_DIR": f"{folder}/runtime"}
    text = ["--data", str(data / "train.txt"), "--held-out", str(data / "valid.txt")]
    names = [f"worker-{number}" for number in range(REPLICAS)]
    with local_swarm(folder / "swarm", real_run()) as swarm:
        for name in names:
            swarm.join(0, name, text)

        def done() -> bool:
            return all(len(shares(swarm, name)) >= SLOTS for name in names)

        wait_for("the slots", done, 60.0 * (SLOTS + 4))
        return [found for name in names for found in shares(swarm, name)[:SLOTS]]


def arm(overlap: bool) -> Arm:
    run = small_run(TOKENS, replicas=REPLICAS, round={"period": 60.0, "settle": 8.0})
    name = "training goes on" if overlap else "training waits"
    return Arm(name, run, TOKENS, regime=str(REGIME), replicas=REPLICAS, overlap=overlap)


def main() -> None:
    asked = options(__doc__)
    arms = {overlap: arm(overlap) for overlap in (False, True)}
    results = play("slot", list(arms.values()), argparse.Namespace(**vars(asked)))
    rows = [row(each.name, results[each.name], table="effect") for each in arms.values()]
    with tempfile.TemporaryDirectory() as folder:
        real = measure_share(unpack(Path(asked.data), Path(folder)), Path(folder))
    headline = {
        "train_share": round(statistics.fmean(found["share"] for found in real), 4),
        "overlap_ce_delta": round(rows[1]["ce"] - rows[0]["ce"], 4),
    }
    print(headline, write_result("slot", asked.seeds, [*rows, *real], headline))


if __name__ == "__main__":
    main()
