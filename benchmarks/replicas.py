"""One, two and four workers a block on the same tokens in all, and updates of 16 and 8 bits against 32.

    python -m benchmarks.replicas --data ../shared/data/wikitext-2.tar.xz --jobs 2

Rounds are of 10 steps, so that four workers a block, each of which sees a quarter of the tokens, are averaged
nine times.
"""

from __future__ import annotations

from benchmarks.arms import Arm, dots, options, play, row, small_run, spread
from benchmarks.report import RESULTS, write_result

TOKENS = 768_000
LOCAL_STEPS = 10


def main() -> None:
    asked = options(__doc__)
    arms = {
        f"replicas_{count}": Arm(
            f"{count} a block, float32",
            small_run(TOKENS, replicas=count, local_steps=LOCAL_STEPS, round={"compression": "float32"}),
            TOKENS,
            replicas=count,
        )
        for count in (1, 2, 4)
    }
    for compression in ("fp16", "int8"):
        arms[compression] = Arm(
            f"2 a block, {compression}",
            small_run(TOKENS, replicas=2, local_steps=LOCAL_STEPS, round={"compression": compression}),
            TOKENS,
            replicas=2,
        )
    results = play("replicas", list(arms.values()), asked)
    rows = [
        row(
            arm.name,
            results[arm.name],
            bytes_moved=round(spread(results[arm.name], "bytes_moved")[0]),
            rounds=results[arm.name][0]["rounds"],
        )
        for arm in arms.values()
    ]
    dots(
        RESULTS / "replicas.png", f"Workers a block and bits of an update, {TOKENS / 1e6:.2f} M tokens", rows
    )
    headline = {f"{name}_ce": found["ce"] for name, found in zip(arms, rows, strict=True)}
    write_result("replicas", asked.seeds, rows, headline)


if __name__ == "__main__":
    main()
