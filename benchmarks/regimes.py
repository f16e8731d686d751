"""A swarm of six under four regimes: who takes part, and how good the model gets.

    python -m benchmarks.regimes --data ../shared/data/wikitext-2.tar.xz --jobs 2

All play the same number of rounds. A machine that misses a deadline trains all the same.
"""

from __future__ import annotations

from benchmarks.arms import Arm, dots, options, play, row, small_run, spread
from benchmarks.report import RESULTS, write_result

TOKENS = 1_536_000
REPLICAS = 2
REGIMES = ("lockstep", "mild", "wan", "bad-edge")


def main() -> None:
    asked = options(__doc__)
    run = small_run(TOKENS, replicas=REPLICAS)
    arms = [Arm(name, run, TOKENS, regime=name, replicas=REPLICAS) for name in REGIMES]
    results = play("regimes", arms, asked)
    rows = [
        row(
            name,
            results[name],
            participation=round(spread(results[name], "participation")[0], 4),
            bytes_moved=round(spread(results[name], "bytes_moved")[0]),
            virtual_seconds=results[name][0]["virtual_seconds"],
        )
        for name in REGIMES
    ]
    labelled = [{**found, "arm": f"{found['arm']} ({found['participation']:.0%})"} for found in rows]
    dots(RESULTS / "regimes.png", "Six workers under four regimes (participation)", labelled)
    headline = {found["arm"].replace("-", "_"): found["ce"] for found in rows}
    write_result("regimes", asked.seeds, rows, headline)


if __name__ == "__main__":
    main()
