"""Six layers in blocks of one, two, three and six: quality against layers a block, and a worker's memory.

python -m benchmarks.depth --data ../shared/data/wikitext-2.tar.xz --jobs 2
"""

from __future__ import annotations

from benchmarks.arms import Arm, dots, options, play, row, small_run
from benchmarks.report import RESULTS, write_result

TOKENS = 768_000
SHAPES = ((6, 1), (3, 2), (2, 3), (1, 6))


def main() -> None:
    from spheroid_node.simulate.costs import cost_of
    from spheroid_node.simulate.methods import BLOCKTRAIN

    asked = options(__doc__)
    arms = {
        shape: Arm(
            f"{shape[0]} blocks of {shape[1]}",
            small_run(TOKENS, model={"blocks": shape[0], "layers": shape[1]}),
            TOKENS,
        )
        for shape in SHAPES
    }
    results = play("depth", list(arms.values()), asked)
    rows = []
    for (blocks, layers), arm in arms.items():
        worst = cost_of(arm.run, BLOCKTRAIN, "cpu").worst
        rows.append(
            row(
                arm.name,
                results[arm.name],
                blocks=blocks,
                layers=layers,
                worker_state_mb=round(worst.state_bytes / 1e6, 2),
                worker_activations_mb=round(worst.activation_bytes / 1e6, 2),
            )
        )
    dots(RESULTS / "depth.png", f"Six layers, cut differently, at {TOKENS / 1e6:.2f} M tokens", rows)
    write_result(
        "depth",
        asked.seeds,
        rows,
        {f"ce_{blocks}x{layers}": found["ce"] for (blocks, layers), found in zip(SHAPES, rows, strict=True)},
    )


if __name__ == "__main__":
    main()
