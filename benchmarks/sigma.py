"""What the range of noise does to the two denoisers.

    python -m benchmarks.sigma --data ../shared/data/wikitext-2.tar.xz --jobs 2

Where σ is low, z tells the target. A network that reads z (``edm``) learns to read it off, its local loss is
excellent, and from noise, where z tells nothing, it fails. ``evidence`` keeps z out of the network.
"""

from __future__ import annotations

from math import log
from pathlib import Path

from benchmarks.arms import Arm, options, play, row, small_run, spread
from benchmarks.report import RESULTS, write_result

TOKENS = 768_000
RANGES = ((0.1, 2.0), (0.5, 5.0), (1.0, 10.0), (2.0, 20.0))


def main() -> None:
    asked = options(__doc__)
    arms = {}
    for denoiser in ("edm", "evidence"):
        for low, high in RANGES:
            noise = {"sigma_min": low, "sigma_max": high, "p_mean": _middle(low, high)}
            # The paper's conditioning, so that nothing but the denoiser and the range differs.
            run = small_run(
                TOKENS,
                noise=noise,
                learning={"denoiser": denoiser, "conditioning": "context"},
            )
            arms[denoiser, low, high] = Arm(f"{denoiser} [{low:g}, {high:g}]", run, TOKENS)
    results = play("sigma", list(arms.values()), asked)
    rows = [
        row(
            arm.name,
            results[arm.name],
            denoiser=denoiser,
            sigma=[low, high],
            ce_local_last=round(_last(results[arm.name], "ce_local"), 4),
            ce_local_posterior_last=round(_last(results[arm.name], "ce_local_posterior"), 4),
            ce_mean_readout=round(spread(results[arm.name], "ce_mean_log_probs")[0], 4),
        )
        for (denoiser, low, high), arm in arms.items()
    ]
    _draw(RESULTS / "sigma.png", rows)
    by = {(found["denoiser"], *found["sigma"]): found["ce"] for found in rows}
    headline = {
        "edm_low": by["edm", *RANGES[0]],
        "edm_high": by["edm", *RANGES[2]],
        "evidence_low": by["evidence", *RANGES[0]],
        "evidence_high": by["evidence", *RANGES[2]],
    }
    write_result("sigma", asked.seeds, rows, headline)


def _middle(low: float, high: float) -> float:
    """Mean of ln σ in the middle of the range, as the default is of [1, 10]."""
    return (log(low) + log(high)) / 2


def _last(results: list[dict[str, list[float]]], field: str) -> float:
    """Of the block that owns the lowest noise: mean over seeds."""
    return sum(result[field][-1] for result in results) / len(results)


def _draw(path: Path, rows: list[dict[str, object]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for denoiser, colour in (("edm", "#e45756"), ("evidence", "#4c78a8")):
        mine = [found for found in rows if found["denoiser"] == denoiser]
        places = range(len(mine))
        axes.errorbar(
            places, [r["ce"] for r in mine], [r["ce_sd"] for r in mine],
            color=colour, marker="o", capsize=3, label=f"{denoiser}, from noise",
        )  # fmt: skip
        axes.plot(
            places, [r["ce_local_posterior_last"] for r in mine],
            color=colour, marker="x", linestyle=":", label=f"{denoiser}, what the last block's loss sees",
        )  # fmt: skip
    axes.set_xticks(range(len(RANGES)), [f"[{low:g}, {high:g}]" for low, high in RANGES])
    axes.set_xlabel("range of σ")
    axes.set_ylabel("cross-entropy on held-out text, nats a byte")
    axes.set_title("Low noise gives the target away to a network that reads z")
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
