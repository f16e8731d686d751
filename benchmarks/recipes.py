"""Which recipe of block-local learning is best, and how far it is from training the whole depth end to end.

    python -m benchmarks.recipes --data ../shared/data/wikitext-2.tar.xz --jobs 2

Every arm trains each of its layers on the same tokens, with the same optimiser rule and schedule, in lockstep
rounds of 50 steps with one worker a block. The default recipe and the transformers are played with all seeds,
the others with the first, and looking ahead in rounds of 10 steps with two. The default, the same looking
ahead, and the transformers are also trained for longer, with the first seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.arms import Arm, dots, options, play, row, small_run
from benchmarks.report import RESULTS, write_result

SHORT = 3_072_000
LONG = 15_360_000

BEST = "evidence + chain"
AHEAD = "evidence + chain, looking ahead"
WHOLE = "full depth, end to end"
OFTEN = {"local_steps": 10}

CONTEXT = {"conditioning": "context"}
RECIPES: dict[str, dict[str, Any]] = {
    "edm + context": {"learning": {"denoiser": "edm"} | CONTEXT},
    "edm + chain": {"learning": {"denoiser": "edm"}},
    "evidence + context": {"learning": CONTEXT},
    f"{BEST}, rounds of 10": {"training": {"local_steps": 10}},
    BEST: {},
}
LOOKING_AHEAD = {"lookahead": 1.0}
OFTEN: dict[str, dict[str, Any]] = {
    f"{AHEAD}, rounds of 10": {"learning": LOOKING_AHEAD, "training": {"local_steps": 10}}
}
LONGER: dict[str, dict[str, Any]] = {BEST: {}, AHEAD: {"learning": LOOKING_AHEAD}}


def transformers(tokens: int) -> list[Arm]:
    plain = small_run(tokens)
    return [
        Arm("one block's depth, end to end", plain, tokens, method="one-block"),
        Arm(WHOLE, plain, tokens, method="end-to-end"),
    ]


def block_local(tokens: int, recipes: Mapping[str, Mapping[str, Any]]) -> list[Arm]:
    return [Arm(name, small_run(tokens, **changes), tokens) for name, changes in recipes.items()]


def main() -> None:
    asked = options(__doc__)
    first = argparse.Namespace(**{**vars(asked), "seeds": asked.seeds[:1]})
    two = argparse.Namespace(**{**vars(asked), "seeds": asked.seeds[:2]})
    results = play("recipes", transformers(SHORT), asked)
    results |= play("recipes", block_local(SHORT, RECIPES), first)
    results |= play("recipes", block_local(SHORT, {BEST: RECIPES[BEST]}), asked)
    results |= play("recipes", block_local(SHORT, OFTEN), two)
    long = play("recipes-long", [*transformers(LONG), *block_local(LONG, LONGER)], first)
    rows = {name: row(name, played) for name, played in results.items()}
    long_rows = {name: row(f"{name}, 15 M tokens", played) for name, played in long.items()}
    dots(RESULTS / "recipes.png", "Recipes at 3 M tokens", list(rows.values()), rows[WHOLE]["ce"])
    best = min(rows[name]["ce"] for name in (*RECIPES, *OFTEN))
    write_result(
        "recipes",
        asked.seeds,
        [*rows.values(), *long_rows.values()],
        {
            "gap_3m": round(best - rows[WHOLE]["ce"], 4),
            "gap_15m": round(min(long_rows[name]["ce"] for name in LONGER) - long_rows[WHOLE]["ce"], 4),
            "ce_best_3m": best,
            "ce_e2e_3m": rows[WHOLE]["ce"],
        },
    )


if __name__ == "__main__":
    main()
