"""What training in bfloat16 costs or gains in quality, against float32, where ``auto`` chooses bfloat16.

python -m benchmarks.precision --data ../shared/data/wikitext-2.tar.xz --jobs 2
"""

from __future__ import annotations

from benchmarks.arms import Arm, dots, options, play, row, small_run
from benchmarks.report import RESULTS, write_result

TOKENS = 768_000


def main() -> None:
    asked = options(__doc__)
    run = small_run(TOKENS)
    arms = {
        "float32": Arm("trained in float32", run, TOKENS, precision="float32"),
        "bf16": Arm("trained in bfloat16", run, TOKENS),
    }
    results = play("precision", list(arms.values()), asked)
    rows = [row(arm.name, results[arm.name]) for arm in arms.values()]
    dots(RESULTS / "precision.png", f"Precision of training at {TOKENS / 1e6:.2f} M tokens", rows)
    write_result(
        "precision",
        asked.seeds,
        rows,
        {f"{precision}_ce": found["ce"] for precision, found in zip(arms, rows, strict=True)},
    )


if __name__ == "__main__":
    main()
