"""``spheroid-node eval``: quality on held-out text, from noise, and what each block has to do with it."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import json_option, peer_options, text_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import NodeConfig, resolve, with_peers
from spheroid_node.errors import OutputUnwritable

if TYPE_CHECKING:
    from torch import Tensor

    from spheroid_node.model.composed import ComposedModel
    from spheroid_node.run import RunSpec
    from spheroid_node.training.diagnosis import Diagnosis
    from spheroid_node.training.evaluation import Evaluation

FIGURE_KINDS = (".png", ".svg")


def figure_path(_ctx: click.Context, _option: click.Parameter, value: str | None) -> Path | None:
    """Callback of ``--plot``: a file that can be written, told before the work and not after it."""
    if value is None:
        return None
    path = Path(value)
    if path.suffix.lower() not in FIGURE_KINDS:
        raise click.BadParameter(f"{value!r} must end in {' or '.join(FIGURE_KINDS)}")
    check_writable(path)
    return path


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
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=0,
    show_default=True,
    help="Of the noise that every prediction starts from.",
)
@click.option(
    "--plot",
    metavar="FILE",
    callback=figure_path,
    help="Draw the figures by block; .png or .svg, by its ending.",
)
@json_option
def command(
    checkpoint: str | None, windows: int, seed: int, plot: Path | None, as_json: bool, **flags: Any
) -> None:
    """Measure the swarm's model, or an exported one, on held-out text.

    Every byte is predicted from noise through all blocks, with the noise fixed by the seed and its position,
    so that two measurements of one model agree. Beside that, each block is measured alone, with pure noise as
    its z (at σ_max), and with the true byte behind noise (local), which shows whether it leans on it.
    """
    from spheroid_node.training.diagnosis import diagnose

    config = resolve(flags)
    set_up_logging(config.log_format, level=logging.WARNING)
    if checkpoint is None:
        model = run_async(_fetch(with_peers(config)))
    else:
        from spheroid_node.model import load

        model = load(Path(checkpoint))
    diagnosis = diagnose(model, _held_out(model.run, config, windows), seed)
    if plot is not None:
        from spheroid_node.cli.eval_chart import draw_diagnosis

        write_figure(plot, draw_diagnosis(model.run, diagnosis, plot.suffix.lower()[1:]))
    if as_json:
        click.echo(json.dumps(figures(diagnosis), indent=2))
    else:
        _print(diagnosis, model.run)
        if plot is not None:
            click.echo(f"Wrote {plot}")


def evaluate(model: ComposedModel, config: NodeConfig, windows: int) -> Evaluation:
    """Measure ``model`` from noise on the held-out text that ``config`` names, or that its run names."""
    from spheroid_node.training.evaluation import from_noise

    return from_noise(model, _held_out(model.run, config, windows))


def compose(run: RunSpec, vectors: Any) -> ComposedModel:
    """The whole model of ``run`` with the parameters in ``vectors``, by group."""
    from spheroid_node.model.composed import ComposedModel
    from spheroid_node.model.parameters import group_module, unflatten_

    model = ComposedModel(run)
    for group, vector in vectors.items():
        unflatten_(group_module(model, group), vector)
    return model.eval()


def figures(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of it as JSON has it."""
    parts = asdict(diagnosis)
    evaluation = parts.pop("from_noise")
    return {
        "ce_by_block": evaluation.pop("ce"),
        "ce": evaluation.pop("ce_readout"),
        **evaluation,
        **parts,
        "leaking": diagnosis.leaking,
    }


def check_writable(path: Path) -> None:
    """Raise :class:`OutputUnwritable` if no file can be made at ``path``."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OutputUnwritable(str(path), error.strerror or str(error)) from error


def write_figure(path: Path, image: bytes) -> None:
    """Write ``image`` whole or not at all. Raises :class:`OutputUnwritable`."""
    from spheroid_node.training.checkpoint import write_atomically

    try:
        write_atomically(path, image)
    except OSError as error:
        raise OutputUnwritable(str(path), error.strerror or str(error)) from error


def _held_out(run: RunSpec, config: NodeConfig, windows: int) -> Tensor:
    from spheroid_node.training.text import held_out_windows, load_text

    text = load_text(run.data, config.data, config.held_out, run.model.window)
    return held_out_windows(text.held_out, windows, run.model.window)


async def _fetch(config: NodeConfig) -> ComposedModel:
    from spheroid_node.node.client import fetch_model, swarm_client

    async with swarm_client(config) as client:
        vectors, _versions = await fetch_model(client)
        return compose(client.run, vectors)


def _print(diagnosis: Diagnosis, run: RunSpec) -> None:
    console = Console()
    console.print(_blocks_table(diagnosis, run))
    console.print()
    console.print(_readouts_table(diagnosis))
    evaluation = diagnosis.from_noise
    console.print(
        f"perplexity {evaluation.perplexity:.3f} · {evaluation.bits_per_byte:.4f} bits a byte · "
        f"{evaluation.bytes:,} bytes of held-out text"
    )
    console.print(_leakage(diagnosis), soft_wrap=True)


def _blocks_table(diagnosis: Diagnosis, run: RunSpec) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="")
    table.title = "CE by block, nats a byte"
    columns = {
        "from noise": diagnosis.from_noise.ce,
        "alone": diagnosis.ce_alone,
        f"at σ_max {run.noise.sigma_max:g}": diagnosis.ce_at_sigma_max,
        "local": diagnosis.ce_local,
    }
    if diagnosis.adds_evidence:
        columns["its posterior"] = diagnosis.ce_local_posterior
    table.add_column("block")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("local at σ", justify="right")
    for block, sigma in enumerate(diagnosis.sigma_local):
        cells = [f"{values[block]:.4f}" for values in columns.values()]
        table.add_row(str(block), *cells, f"{sigma:.3g}")
    return table


def _readouts_table(diagnosis: Diagnosis) -> Table:
    evaluation = diagnosis.from_noise
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("from noise, read out of")
    table.add_column("CE, nats a byte", justify="right")
    table.add_row("the mean of all blocks' log-probabilities", f"{evaluation.ce_mean_log_probs:.4f}")
    table.add_row("the mean of the last two blocks'", f"{diagnosis.ce_mean_last_two:.4f}")
    table.add_row("what the run reads out", f"{evaluation.ce_readout:.4f}", style="bold")
    table.add_row("the same, context scrambled", f"{diagnosis.ce_scrambled_readout:.4f}")
    return table


def _leakage(diagnosis: Diagnosis) -> str:
    if not diagnosis.leaking:
        return "No local CE is far below the one from noise: no block leans on a true byte in z."
    blocks = ", ".join(str(block) for block in diagnosis.leaking)
    return (
        f"Leakage in block {blocks}: a local CE far below the one from noise means that the block reads the "
        "true byte out of z, and at inference z does not hold it."
    )
