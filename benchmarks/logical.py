"""Sweeps through chains of logical shapes, up to 76 B parameters: `bench serve` by width.

    python -m benchmarks.logical

Every shape has the same blocks and layers, so that the width alone changes; each is measured in a process of
its own, with the memory of one layer. A shape is measured twice: first one sweep, which says how many fit in
the time there is. Writes results/logical.json and logical.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, write_result
from spheroid_node.run import ModelSpec, RunSpec
from spheroid_node.training.plan import total_elements

WIDTHS = [512, 1024, 2048, 4096, 8192, 12288, 18432]
POSITIONS = [1, 128]
BLOCKS, LAYERS = 9, 2
"""At the largest width 76.1 B parameters; no other split of its 18 layers comes within 1 % of 75.8 B but
6 × 3, which is below it."""
HEAD_WIDTH = 128
SECONDS = 60.0
"""Of sweeps, for one row: five and more of those that take up to twelve seconds."""
SWEEPS = 2, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="N", help="divisible by 128")
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS, metavar="N", help="of a sweep")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of sweeps, for one row")
    asked = parser.parse_args()
    rows = []
    for positions in asked.positions:
        for width in asked.widths:
            rows.append(measure(shape(width), positions, asked.seconds))
            print(json.dumps(rows[-1]), flush=True)
    draw(RESULTS / "logical.png", rows)
    print(write_result("logical", [0], rows, headline(rows)))


def shape(width: int) -> ModelSpec:
    return ModelSpec(blocks=BLOCKS, layers=LAYERS, width=width, heads=width // HEAD_WIDTH, window=1024)


def measure(model: ModelSpec, positions: int, seconds: float) -> dict[str, Any]:
    """A row: what `bench serve` says of ``model``, from as many sweeps as fit in ``seconds``."""
    fewest, most = SWEEPS
    found = serve(model, positions, 1)
    found = serve(model, positions, max(fewest, min(most, int(seconds / found["seconds"][0]))))
    served = found.pop("shape")
    return {
        **{name: served["model"][name] for name in ("width", "blocks", "layers", "heads")},
        **{name: served[name] for name in ("parameters", "stored_bytes", "dtype", "threads")},
        **found,
    }


def serve(model: ModelSpec, positions: int, sweeps: int) -> dict[str, Any]:
    options = {
        "--logical": total_elements(RunSpec(name="logical", model=model)),
        "--blocks": model.blocks,
        "--width": model.width,
        "--positions": positions,
        "--sweeps": sweeps,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "spheroid_node", "bench", "serve", "--json", *words]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def headline(rows: list[dict[str, Any]]) -> dict[str, float | dict[str, float]]:
    """By width; ``sweeps_per_s`` and ``mb_per_s`` of the fewest positions measured."""
    counts = sorted({row["positions"] for row in rows})
    figures: dict[str, float | dict[str, float]] = {}
    for positions in counts:
        suffix = "" if positions == counts[0] else f"_of_{positions}"
        for name in ("sweeps_per_s", "mb_per_s"):
            figures[name + suffix] = {str(row["width"]): round(row[name], 4) for row in _of(rows, positions)}
    return figures | {"largest_params_b": round(max(row["parameters"] for row in rows) / 1e9, 2)}


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    titles = {"sweeps_per_s": "sweeps/s", "mb_per_s": "MB/s of frames"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for positions in sorted({row["positions"] for row in rows}):
            of_count = _of(rows, positions)
            widths, values = [row["width"] for row in of_count], [row[name] for row in of_count]
            axes.loglog(widths, values, marker="o", label=f"{positions} position{'s' * (positions > 1)}")
        widths = sorted({row["width"] for row in rows})
        axes.set_xticks(widths, [str(width) for width in widths], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("width")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    panels[0].legend(title="a sweep of")
    figure.suptitle(f"A chain of {rows[0]['blocks']} blocks of {rows[0]['layers']} layers, one layer stored")
    figure.savefig(path, dpi=130)


def _of(rows: Iterable[dict[str, Any]], positions: int) -> list[dict[str, Any]]:
    return sorted((row for row in rows if row["positions"] == positions), key=lambda row: row["width"])


if __name__ == "__main__":
    main()
