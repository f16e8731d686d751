"""``spheroid-node bench``: what this machine makes of shapes that nobody has trained."""

from __future__ import annotations

import json
import logging
import resource
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import json_option
from spheroid_node.cli.runner import run_async
from spheroid_node.cli.sizes import decimal, quantity, run_of_size

if TYPE_CHECKING:
    from spheroid_node.run import RunSpec
    from spheroid_node.serving.logical import LogicalModel
    from spheroid_node.serving.loopback import SweepCost


@click.group("bench")
def command() -> None:
    """Measure this machine on shapes of any size, without a swarm."""


@command.command("serve")
@click.option(
    "--logical",
    "parameters",
    metavar="N",
    required=True,
    callback=quantity,
    help="Parameters of the shape, such as 75.8B.",
)
@click.option("--blocks", type=click.IntRange(min=1), default=3, show_default=True, help="Hops of the chain.")
@click.option("--width", type=click.IntRange(min=1), metavar="N", help="Default: what `plan` would choose.")
@click.option(
    "--positions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Bytes that a sweep brings and decides: 1 as autoregressive, many as one-sweep.",
)
@click.option(
    "--sweeps", type=click.IntRange(min=1), default=3, show_default=True, help="To time; one goes before."
)
@json_option
def serve(
    parameters: int, blocks: int, width: int | None, positions: int, sweeps: int, as_json: bool
) -> None:
    """Time sweeps through a chain of blocks of which one layer is stored.

    Weights are generated, and one layer's stand for those of every layer of every block, so that the largest
    shape fits in a small memory. All else is as in a swarm: a hop service for each block, TLS on loopback,
    caches, the arithmetic of every layer. The hops are in this one process and compute in turn.
    """
    set_up_logging("auto", level=logging.WARNING)
    run = run_of_size(parameters, blocks, **({} if width is None else {"width": width}))
    _check_length(positions * (1 + sweeps))
    model = _model_of(run)
    shape = _shape(run, model)
    if not as_json:
        click.echo("\n".join(_heading(shape)))
    report = _report(shape, positions, _timed(model, positions, sweeps))
    click.echo(json.dumps(asdict(report), indent=2) if as_json else "\n".join(_lines(report)))


@dataclass(frozen=True)
class Shape:
    """What is served."""

    parameters: int
    """Of the logical shape."""
    model: dict[str, Any]
    dtype: str
    """Of the weights, and what is computed in."""
    stored_bytes: int
    """What the weights really take up."""
    threads: int


@dataclass(frozen=True)
class Report:
    """Everything that ``bench serve`` shows; ``--json`` prints these fields. Medians over sweeps."""

    shape: Shape
    positions: int
    """New ones that a sweep brings and decides at."""
    seconds: list[float]
    """Of each sweep."""
    sweeps_per_s: float
    mb_per_s: float
    """10⁶ bytes of frames, each counted once."""
    bytes_a_sweep: int
    compute_seconds: float
    """That a hop computes in a sweep: the mean over the hops."""
    rest_seconds: float
    """That a hop takes in a sweep beside that: transport and scheduling."""
    peak_bytes: int
    """Most memory that this process ever had."""


def _check_length(positions: int) -> None:
    from spheroid_node.serving.sessions import Limits

    if positions > Limits.positions:
        raise click.UsageError(
            f"--positions times --sweeps, and one sweep more, make a text of {positions:,} positions; a hop "
            f"takes {Limits.positions:,}"
        )


def _model_of(run: RunSpec) -> LogicalModel:
    """Generated, if this machine has the memory."""
    import psutil
    import torch

    from spheroid_node.serving.logical import LogicalModel
    from spheroid_node.training.device import resolve_precision

    half = resolve_precision("auto", torch.device("cpu"))
    model = LogicalModel(run, torch.bfloat16 if half else torch.float32)
    free = psutil.virtual_memory().available
    if model.stored_bytes > free:
        raise click.UsageError(
            f"one layer of width {run.model.width} takes {decimal(model.stored_bytes, 'B')}, and "
            f"{decimal(free, 'B')} of memory are free; give a smaller --width"
        )
    return model


def _shape(run: RunSpec, model: LogicalModel) -> Shape:
    import torch

    from spheroid_node.training.plan import total_elements

    return Shape(
        parameters=total_elements(run),
        model=run.model.model_dump(),
        dtype=str(model.dtype).removeprefix("torch."),
        stored_bytes=model.stored_bytes,
        threads=torch.get_num_threads(),
    )


def _timed(model: LogicalModel, positions: int, sweeps: int) -> list[SweepCost]:
    from spheroid_node.serving.chain import ChainLost
    from spheroid_node.serving.loopback import time_sweeps
    from spheroid_node.serving.remote import HopFailed

    try:
        return run_async(time_sweeps(model.generate().hops, positions, sweeps))
    except (HopFailed, ChainLost) as error:
        raise click.ClickException(f"The chain failed: {error}.") from error


def _report(shape: Shape, positions: int, costs: list[SweepCost]) -> Report:
    hops = shape.model["blocks"]
    seconds = statistics.median(cost.seconds for cost in costs)
    sent = statistics.median_low(cost.bytes for cost in costs)
    return Report(
        shape=shape,
        positions=positions,
        seconds=[cost.seconds for cost in costs],
        sweeps_per_s=1 / seconds,
        mb_per_s=sent / seconds / 1e6,
        bytes_a_sweep=sent,
        compute_seconds=statistics.median(sum(cost.hop_seconds) for cost in costs) / hops,
        rest_seconds=statistics.median(cost.rest for cost in costs) / hops,
        peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


# --- for people -----------------------------------------------------------------------------------


def _heading(shape: Shape) -> list[str]:
    model = shape.model
    return [
        f"{decimal(shape.parameters)} parameters: {model['blocks']} blocks of {model['layers']} layers, "
        f"width {model['width']}, {model['heads']} heads",
        f"{decimal(shape.stored_bytes, 'B')} stored, one layer in {shape.dtype}; threads: {shape.threads}",
    ]


def _lines(report: Report) -> list[str]:
    what = "1 position" if report.positions == 1 else f"{report.positions} positions"
    rows = {
        f"sweeps of {what}": str(len(report.seconds)),
        "sweeps/s": f"{report.sweeps_per_s:.4g}",
        "bytes/s decided": f"{report.positions * report.sweeps_per_s:.4g}",
        "frames": f"{report.mb_per_s:.4g} MB/s",
        "frames of a sweep": decimal(report.bytes_a_sweep, "B"),
        "a hop computes": f"{1e3 * report.compute_seconds:.4g} ms",
        "transport and scheduling": f"{1e3 * report.rest_seconds:.4g} ms a hop",
        "memory, at most": decimal(report.peak_bytes, "B"),
    }
    width = max(map(len, rows))
    return [f"{title:<{width}}  {figure}" for title, figure in rows.items()]
