"""What a training step costs: a worker of each block, in both precisions, translated and not.

    python -m benchmarks.step --data ../shared/data/wikitext-2.tar.xz

One thread. Everything is measured in turns in one run, so that a busy moment of the machine hits all alike;
a figure is the median over the turns. ``plain`` is a transformer of one block's depth written with PyTorch's
own layers, with the same embedding, head, optimiser and batch. A worker of a block does more: it draws
noise, runs the blocks upstream, and looks ahead through the next one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.arms import small_run, unpack
from benchmarks.report import RESULTS, write_result
from spheroid_node.model.randomness import stream
from spheroid_node.run import RunSpec
from spheroid_node.simulate.methods import METHODS
from spheroid_node.training.device import mixed_precision, resolve_precision
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.text import Text, load_text, sample_windows

TURNS = 7
STEPS = 10
SETTINGS = (("float32", False), ("float32", True), ("bf16", False), ("bf16", True))


class Plain(nn.Module):
    """PyTorch's own layers: pre-norm, causal, learned positions."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__()
        model = run.model
        self.embedding = nn.Embedding(257, model.width)
        self.position = nn.Parameter(torch.zeros(model.window, model.width))
        layer = nn.TransformerEncoderLayer(
            model.width,
            model.heads,
            4 * model.width,
            0.0,
            F.gelu,
            batch_first=True,
            norm_first=True,
            bias=False,
        )
        self.layers = nn.TransformerEncoder(
            layer, model.layers, nn.LayerNorm(model.width, bias=False), enable_nested_tensor=False
        )
        self.head = nn.Linear(model.width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(model.window))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT) + self.position
        return self.head(self.layers(x_BTD, self.mask, is_causal=True))  # type: ignore[no-any-return]


def plain_step(run: RunSpec, text: Text, precision: str, compiled: bool) -> Callable[[], None]:
    """A training step of the plain transformer, as anybody would write it."""
    device = torch.device("cpu")
    mixed, model = resolve_precision(precision, device), Plain(run)
    forward = torch.compile(model, dynamic=False) if compiled else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), fused=True)
    source = stream(0, 0)

    def step() -> None:
        windows_BT = sample_windows(text.train, run.training.batch, run.model.window, source)
        with mixed_precision(device, mixed):
            logits_BTV = forward(windows_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), windows_BT[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def our_step(run: RunSpec, block: int, text: Text, precision: str, compiled: bool) -> Callable[[], None]:
    trainer = LocalTrainer(run, block, text, "cpu", 0, precision, compiled)
    trainer.warm_up()

    def step() -> None:
        trainer.step()

    return step


def measure(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of one step of each, measured in turns."""
    for step in steps.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds[name].append((time.perf_counter() - begun) / STEPS)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", required=True, help="wikitext-2.tar.xz, or a folder with train.txt and valid.txt"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    run = small_run(3_072_000)
    single = METHODS["one-block"].run_of(run)
    tokens = run.training.batch * run.model.window
    with tempfile.TemporaryDirectory() as folder:
        place = unpack(Path(asked.data), Path(folder))
        text = load_text(run.data, [str(place / "train.txt")], [str(place / "valid.txt")], run.model.window)
    steps: dict[str, Callable[[], None]] = {}
    for precision, compiled in SETTINGS:
        setting = f"{precision}{', compiled' if compiled else ''}"
        steps[f"plain, {setting}"] = plain_step(run, text, precision, compiled)
        steps[f"same without noise, {setting}"] = our_step(single, 0, text, precision, compiled)
        for block in range(run.model.blocks):
            steps[f"worker of block {block}, {setting}"] = our_step(run, block, text, precision, compiled)
    rows: list[dict[str, Any]] = [
        {"what": name, "step_ms": round(1e3 * seconds, 2), "tokens_per_s": round(tokens / seconds)}
        for name, seconds in measure(steps).items()
    ]
    rate = {found["what"]: found["tokens_per_s"] for found in rows}
    workers = [rate[f"worker of block {block}, bf16"] for block in range(run.model.blocks)]
    before = [rate[f"worker of block {block}, float32"] for block in range(run.model.blocks)]
    compiled_workers = [rate[f"worker of block {block}, bf16, compiled"] for block in range(run.model.blocks)]
    draw(RESULTS / "step.png", rows)
    write_result(
        "step",
        [0],
        rows,
        {
            "tokens_per_s": round(statistics.fmean(workers)),
            "tokens_per_s_compiled": round(statistics.fmean(compiled_workers)),
            "tokens_per_s_before": round(statistics.fmean(before)),
            "ratio_to_plain": round(rate["same without noise, bf16"] / rate["plain, bf16"], 3),
            "ratio_to_plain_float32": round(rate["same without noise, float32"] / rate["plain, float32"], 3),
            "ratio_to_plain_compiled": round(
                rate["same without noise, bf16, compiled"] / rate["plain, bf16, compiled"], 3
            ),
        },
    )


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 6), layout="constrained")
    colours = ["#4c78a8" if found["what"].startswith("worker") else "#bab0ac" for found in rows]
    axes.barh([found["what"] for found in rows], [found["tokens_per_s"] for found in rows], color=colours)
    axes.invert_yaxis()
    axes.set_xlabel("tokens a second, one thread")
    axes.set_title("A training step of two layers, width 128")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
