"""The demo's figure: from-noise CE by round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spheroid_node.run import RunSpec

UNIFORM_CE = 5.545177
"""Nats a byte of knowing nothing: ln 256."""


def draw_chart(path: Path, run: RunSpec, curve: Mapping[int, float], final: float) -> None:
    """Write a PNG of ``curve``, round → CE, and of ``final``, the CE of the exported model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    rounds = sorted(curve)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.axhline(UNIFORM_CE, color="0.7", linewidth=1, linestyle=":", label="uniform guess, ln 256")
    axes.plot(rounds, [curve[number] for number in rounds], marker="o", markersize=3, label="by round")
    axes.plot([(rounds[-1] if rounds else 0) + 1], [final], marker="*", markersize=10, label="exported model")
    axes.set(
        title=f"{run.name}: {run.model.blocks} blocks, text {run.data.name}",
        xlabel="round",
        ylabel="from-noise CE on held-out text, nats a byte",
        ylim=(0, None),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
