"""Blocks of transformer layers against blocks of causal MLPs.

python -m benchmarks.mixers --data ../shared/data/wikitext-2.tar.xz --jobs 2
"""

from __future__ import annotations

from benchmarks.arms import Arm, bars, options, play, row, small_run
from benchmarks.report import RESULTS, write_result

TOKENS = 768_000


def main() -> None:
    from spheroid_node.training.plan import total_elements

    asked = options(__doc__)
    arms = {
        mixer: Arm(f"blocks of {name}", small_run(TOKENS, model={"mixer": mixer}), TOKENS)
        for mixer, name in (("attention", "transformer layers"), ("mlp", "causal MLPs"))
    }
    results = play("mixers", list(arms.values()), asked)
    rows = [row(arm.name, results[arm.name], parameters=total_elements(arm.run)) for arm in arms.values()]
    bars(RESULTS / "mixers.png", f"Transformer against MLP at {TOKENS / 1e6:.2f} M tokens", rows)
    write_result(
        "mixers",
        asked.seeds,
        rows,
        {f"{mixer}_ce": found["ce"] for mixer, found in zip(arms, rows, strict=True)},
    )


if __name__ == "__main__":
    main()
