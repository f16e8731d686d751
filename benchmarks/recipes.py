"""Which recipe of block-local learning is best, and how far it is from training the whole depth end to end.

    python -m benchmarks.recipes --data ../shared/data/wikitext-2.tar.xz --jobs 2

Every arm trains each of its layers on the same tokens, with the same optimiser rule and schedule, in lockstep
rounds of 50 steps with one worker a block. The best block-local recipe and the transformer of full depth are
also trained for longer, with the first seed. ``--only`` names recipes to compare with the transformers.
"""

from __future__ import annotations

from typing import Any

from benchmarks.arms import Arm, bars, options, play, row, small_run
from benchmarks.report import RESULTS, write_result

SHORT = 3_072_000
LONG = 15_360_000

BEST = "evidence + chain"
WHOLE = "full depth, end to end"

RECIPES: dict[str, dict[str, Any]] = {
    "edm + context": {"denoiser": "edm", "conditioning": "context"},
    "edm + chain": {"denoiser": "edm"},
    "evidence + context": {"conditioning": "context"},
    "no noise + chain": {"denoiser": "plain"},
    "evidence + chain, looking ahead": {"lookahead": 1.0},
    "evidence + chain, all blocks at their newest": {"staggered": False},
    BEST: {},
}


def arms(tokens: int, names: list[str]) -> list[Arm]:
    plain = small_run(tokens)
    others = [
        Arm("one block's depth, end to end", plain, tokens, method="one-block"),
        Arm(WHOLE, plain, tokens, method="end-to-end"),
    ]
    return [
        *others,
        *(Arm(name, small_run(tokens, learning=RECIPES[name]), tokens) for name in reversed(names)),
    ]


def main() -> None:
    asked = options(__doc__)
    names, asked.only = asked.only or list(RECIPES), None  # a table of some recipes is one, too
    short = play("recipes", arms(SHORT, names), asked)
    rows = {name: row(name, results) for name, results in short.items()}
    seeds, asked.seeds = asked.seeds, asked.seeds[:1]
    long = play("recipes-long", [arm for arm in arms(LONG, [BEST]) if arm.name in (BEST, WHOLE)], asked)
    long_rows = {name: row(f"{name}, 15 M tokens", results) for name, results in long.items()}
    bars(RESULTS / "recipes.png", "Recipes at 3 M tokens", list(rows.values()), rows[WHOLE]["ce"])
    write_result(
        "recipes",
        seeds,
        [*rows.values(), *long_rows.values()],
        {
            "gap_3m": round(rows[BEST]["ce"] - rows[WHOLE]["ce"], 4),
            "gap_15m": round(long_rows[BEST]["ce"] - long_rows[WHOLE]["ce"], 4),
            "ce_best_3m": rows[BEST]["ce"],
            "ce_e2e_3m": rows[WHOLE]["ce"],
        },
    )


if __name__ == "__main__":
    main()
