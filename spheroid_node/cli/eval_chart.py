"""The figure of ``eval --plot``: what each block does in and out of its place, and the read-outs."""

from __future__ import annotations

import io
import math
from typing import Any

from spheroid_node.run import RunSpec
from spheroid_node.training.diagnosis import Diagnosis

DODGE = 0.09
"""Shift between two measures of a block, in blocks: many of them coincide, and would hide each other."""


def draw_diagnosis(run: RunSpec, diagnosis: Diagnosis, kind: str) -> bytes:
    """The figure as ``kind``, png or svg; the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evaluation = diagnosis.from_noise
    figure, (by_block, readouts) = pyplot.subplots(
        1, 2, figsize=(11, 5.2), width_ratios=(5, 3), layout="constrained"
    )
    figure.suptitle(
        f"{run.name}: {run.model.blocks} blocks, denoiser {run.learning.denoiser}, conditioning "
        f"{run.learning.conditioning}, σ {run.noise.sigma_max:g} to {run.noise.sigma_min:g}; "
        f"{evaluation.bytes:,} bytes of held-out text"
    )
    _draw_blocks(by_block, run, diagnosis)
    _draw_readouts(readouts, diagnosis)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize="small")
    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "spheroid-node"}):
        figure.savefig(image, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    pyplot.close(figure)
    return image.getvalue()


def _draw_blocks(axes: Any, run: RunSpec, diagnosis: Diagnosis) -> None:
    measures = [
        ("from noise, after the block", "o-", diagnosis.from_noise.ce),
        ("alone: without the blocks before", "s--", diagnosis.ce_alone),
        (f"at σ_max = {run.noise.sigma_max:g}: pure noise in place of z", "^--", diagnosis.ce_at_sigma_max),
        ("local: with the true byte behind noise", "D:", diagnosis.ce_local),
    ]
    if diagnosis.adds_evidence:
        measures.append(("posterior of local: what is trained", "v:", diagnosis.ce_local_posterior))
    blocks = range(run.model.blocks)
    for number, (label, style, ce) in enumerate(measures):
        shift = DODGE * (number - (len(measures) - 1) / 2)
        axes.plot([block + shift for block in blocks], ce, style, markersize=6, linewidth=1.2, label=label)
    axes.set(
        xlabel="block, and the σ of its local measure",
        ylabel="CE on held-out text, nats a byte",
        xlim=(-0.5, run.model.blocks - 0.5),
    )
    shown = blocks[:: math.ceil(run.model.blocks / 8)]
    axes.set_xticks(shown, [f"{block}\nσ {diagnosis.sigma_local[block]:.3g}" for block in shown])
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_readouts(axes: Any, diagnosis: Diagnosis) -> None:
    evaluation = diagnosis.from_noise
    names = ("what the run\nreads out", "mean of\nall blocks", "mean of the\nlast two", "context\nscrambled")
    values = (
        evaluation.ce_readout,
        evaluation.ce_mean_log_probs,
        diagnosis.ce_mean_last_two,
        diagnosis.ce_scrambled_readout,
    )
    bars = axes.barh(names, values, color=("C0", "0.65", "0.65", "C3"))
    axes.bar_label(bars, fmt="%.3f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="CE from noise, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
