"""``spheroid-node eval``: quality on held-out text, always from noise through the whole chain."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import json_option, peer_options, text_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import NodeConfig, resolve, with_peers

if TYPE_CHECKING:
    from spheroid_node.model.composed import ComposedModel
    from spheroid_node.training.evaluation import Evaluation


@click.command("eval")
@click.option("--checkpoint", metavar="DIR", help="Measure this exported model instead of the swarm's.")
@peer_options
@text_options
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Windows of held-out text to measure on.",
)
@json_option
def command(checkpoint: str | None, windows: int, as_json: bool, **flags: Any) -> None:
    """Measure the swarm's model, or an exported one, on held-out text.

    Every byte is predicted from noise through all blocks, with the noise fixed by its position, so that two
    measurements of one model agree.
    """
    config = resolve(flags)
    set_up_logging(config.log_format, level=logging.WARNING)
    if checkpoint is None:
        evaluation = run_async(_evaluate_swarm(with_peers(config), windows))
    else:
        from spheroid_node.model import load

        evaluation = evaluate(load(Path(checkpoint)), config, windows)
    _print(evaluation, as_json)


def evaluate(model: ComposedModel, config: NodeConfig, windows: int) -> Evaluation:
    """Measure ``model`` on the held-out text that ``config`` names, or that its run names."""
    from spheroid_node.training.evaluation import from_noise
    from spheroid_node.training.text import held_out_windows, load_text

    window = model.run.model.window
    text = load_text(model.run.data, config.data, config.held_out, window)
    return from_noise(model, held_out_windows(text.held_out, windows, window))


async def _evaluate_swarm(config: NodeConfig, windows: int) -> Evaluation:
    from spheroid_node.node.client import fetch_model, swarm_client

    async with swarm_client(config) as client:
        vectors, _versions = await fetch_model(client)
        run = client.run
    return evaluate(compose(run, vectors), config, windows)


def compose(run: Any, vectors: Any) -> ComposedModel:
    """The whole model of ``run`` with the parameters in ``vectors``, by group."""
    from spheroid_node.model.composed import ComposedModel
    from spheroid_node.model.parameters import group_module, unflatten_

    model = ComposedModel(run)
    for group, vector in vectors.items():
        unflatten_(group_module(model, group), vector)
    return model.eval()


def _print(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        click.echo(
            json.dumps(
                {
                    "ce_by_block": evaluation.ce,
                    "ce": evaluation.ce_readout,
                    "ce_mean_log_probs": evaluation.ce_mean_log_probs,
                    "perplexity": evaluation.perplexity,
                    "bits_per_byte": evaluation.bits_per_byte,
                    "bytes": evaluation.bytes,
                },
                indent=2,
            )
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("from noise, after")
    table.add_column("CE, nats a byte", justify="right")
    for block, ce in enumerate(evaluation.ce):
        table.add_row(f"block {block}", f"{ce:.4f}")
    table.add_row("mean of the blocks' log-probabilities", f"{evaluation.ce_mean_log_probs:.4f}")
    table.add_row("what the run reads out", f"{evaluation.ce_readout:.4f}", style="bold")
    console = Console()
    console.print(table)
    console.print(
        f"perplexity {evaluation.perplexity:.3f} · {evaluation.bits_per_byte:.4f} bits a byte · "
        f"{evaluation.bytes:,} bytes of held-out text"
    )
