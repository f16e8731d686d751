"""Which recipe of block-local learning is best, and how far it is from training the whole depth end to end.

    python -m benchmarks.recipes --data ../shared/data/wikitext-2.tar.xz --jobs 2

Every arm trains each of its layers on the same tokens, with the same optimiser rule and schedule, in lockstep
rounds of 50 steps with one worker a block. The best block-local recipe and the transformers of full depth and
of one block's depth are also trained for longer, as far as --long says.
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
    short = play("recipes", arms(SHORT, list(RECIPES)), asked)
    rows = [row(name, results) for name, results in short.items()]
    asked.seeds = asked.seeds[:1]
    long = play("recipes-long", arms(LONG, [BEST]), asked)
    bars(RESULTS / "recipes.png", "Recipes at 3 M tokens", rows, _ce(rows, WHOLE))
    long_rows = [row(f"{name}, 15 M tokens", results) for name, results in long.items()]
    write_result(
        "recipes",
        asked.seeds,
        [*rows, *long_rows],
        {
            "gap_3m": round(_ce(rows, BEST) - _ce(rows, WHOLE), 4),
            "gap_15m": round(_ce(long_rows, BEST) - _ce(long_rows, WHOLE), 4),
            "ce_best_3m": _ce(rows, BEST),
            "ce_e2e_3m": _ce(rows, WHOLE),
        },
    )


def _ce(rows: list[dict[str, Any]], name: str) -> float:
    return float(next(found["ce"] for found in rows if str(found["arm"]).startswith(name)))


if __name__ == "__main__":
    main()
