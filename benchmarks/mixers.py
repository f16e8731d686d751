"""Blocks of transformer layers against blocks of causal MLPs; in longer training with one seed.

python -m benchmarks.mixers --data ../shared/data/wikitext-2.tar.xz --jobs 2
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.arms import Arm, dots, options, play, row, small_run
from benchmarks.report import RESULTS, write_result

SHORT = 768_000
LONG = 3_072_000
MIXERS = {"attention": "transformer layers", "mlp": "causal MLPs"}


def main() -> None:
    from spheroid_node.training.plan import total_elements

    asked = options(__doc__)
    first = argparse.Namespace(**{**vars(asked), "seeds": asked.seeds[:1]})
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    for table, tokens, seeds in (("mixers", SHORT, asked), ("mixers-long", LONG, first)):
        arms = {
            mixer: Arm(f"blocks of {name}", small_run(tokens, model={"mixer": mixer}), tokens)
            for mixer, name in MIXERS.items()
        }
        results = play(table, list(arms.values()), seeds)
        for mixer, arm in arms.items():
            found = row(arm.name, results[arm.name], parameters=total_elements(arm.run))
            found["arm"] += f", {found['tokens'] / 1e6:.2f} M"
            rows.append(found)
            headline[f"{mixer}_ce" if tokens == SHORT else f"{mixer}_ce_long"] = found["ce"]
    dots(RESULTS / "mixers.png", "Transformer against MLP, by tokens", rows)
    write_result("mixers", asked.seeds, rows, headline)


if __name__ == "__main__":
    main()
