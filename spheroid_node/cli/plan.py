"""``spheroid-node plan``: what owning a block of a run asks of a machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from rich.console import Console
from rich.table import Table

from spheroid_node.cli.options import json_option
from spheroid_node.cli.sizes import decimal, quantity, run_of_size

if TYPE_CHECKING:
    from spheroid_node.run import RunSpec
    from spheroid_node.training.plan import DeviceKind, Needs

CARDS_GIB = (8, 12, 16, 24, 48, 80)


@click.command("plan")
@click.option("--run", "run_file", metavar="FILE", help="Run file.")
@click.option(
    "--params", "parameters", metavar="N", callback=quantity, help="Or a size: parameters, such as 75.8B."
)
@click.option("--blocks", type=click.IntRange(min=1), metavar="N", help="With --params: blocks.")
@click.option(
    "--width", type=click.IntRange(min=1), metavar="N", help="Default: about 128 a layer of the whole depth."
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Layers of a block. Default: what fits --params.",
)
@click.option("--heads", type=click.IntRange(min=1), metavar="N", help="Default: heads 128 wide.")
@click.option("--window", type=click.IntRange(min=2), metavar="N", help="Bytes of a window. Default: 1024.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Windows of a step. Default: 16.")
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    default="cuda",
    show_default=True,
    help="Whose memory: bfloat16 arithmetic on cuda, float32 on cpu.",
)
@json_option
def command(
    run_file: str | None, parameters: int | None, device: DeviceKind, as_json: bool, **shape: int | None
) -> None:
    """What owning a block of a run asks of a machine: memory to train it, bytes to move in a round.

    Also what training the whole model on one machine would ask, and which cards are enough. Computed from the
    model's own modules on tensors without memory, so a run of any size can be planned on any machine.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    run = _run_of_file(run_file, parameters, given) if run_file else _run_of_shape(parameters, given)
    report = report_of(run, device)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report, parameters)


def _run_of_file(run_file: str, parameters: int | None, given: dict[str, int]) -> RunSpec:
    from spheroid_node.run import RunSpec

    excess = [*(["--params"] if parameters is not None else []), *(f"--{name}" for name in given)]
    if excess:
        raise click.UsageError(f"--run names a whole run: leave out {', '.join(excess)}")
    return RunSpec.from_toml(Path(run_file))


def _run_of_shape(parameters: int | None, given: dict[str, int]) -> RunSpec:
    if parameters is None or "blocks" not in given:
        raise click.UsageError("Give a run with --run, or a size with --params and --blocks")
    return run_of_size(parameters, **given)


@dataclass(frozen=True)
class Card:
    """What a GPU with ``gib`` GiB of memory can train."""

    gib: int
    blocks: list[int]
    """That it can own."""
    context: bool
    """Whether it could own any block, if the run's conditioning were ``context``."""
    full_replica: bool


@dataclass(frozen=True)
class Worker:
    """Bytes that one worker needs, and moves in a round."""

    memory: Needs
    adamw: int
    """Of this, parameters, gradients and moments: 16 B for each parameter that it trains."""
    total: int
    sent: dict[str, int]
    """Its updates, by compression."""
    fetched: int
    """New versions."""


@dataclass(frozen=True)
class Report:
    """Everything that ``plan`` shows; ``--json`` prints these fields."""

    run: str
    run_id: str
    model: dict[str, Any]
    batch: int
    compression: str
    parameters: dict[str, int]
    """Of a block, of the interface, of all."""
    device: str
    worst_block: int
    """The block that needs the most memory."""
    workers: dict[str, Worker]
    """``block_0``; ``worst_block``; ``context``: of any block, if the run's conditioning were ``context``;
    ``full_replica``: of the whole model."""
    cards: list[Card]


def report_of(run: RunSpec, device: DeviceKind) -> Report:
    """All figures of ``run``; the workers' memory is that of ``device``, cards are always GPUs."""
    from spheroid_node.run import INTERFACE_GROUP, block_group
    from spheroid_node.training import plan

    in_context = run.learning.model_copy(update={"conditioning": "context"})
    context = run.model_copy(update={"learning": in_context})
    whole = plan.end_to_end(run)
    on_gpu = [plan.plan(run, block) for block in range(run.model.blocks)]
    worst = max(range(run.model.blocks), key=lambda block: on_gpu[block].total)
    any_block, all_blocks = plan.plan(context, 0), plan.plan(whole, 0)
    return Report(
        run=run.name,
        run_id=run.run_id,
        model=run.model.model_dump(),
        batch=run.training.batch,
        compression=run.round.compression,
        parameters={
            "block": plan.group_elements(run, block_group(worst)),
            "interface": plan.group_elements(run, INTERFACE_GROUP),
            "all": plan.total_elements(run),
        },
        device=device,
        worst_block=worst,
        workers={
            "block_0": _worker(run, 0, device),
            "worst_block": _worker(run, worst, device),
            "context": _worker(context, 0, device),
            "full_replica": _worker(whole, 0, device),
        },
        cards=[
            Card(
                gib=gib,
                blocks=[block for block, needs in enumerate(on_gpu) if plan.fits(needs, gib)],
                context=plan.fits(any_block, gib),
                full_replica=plan.fits(all_blocks, gib),
            )
            for gib in CARDS_GIB
        ],
    )


def _worker(run: RunSpec, block: int, device: DeviceKind) -> Worker:
    from spheroid_node.run import RoundSpec
    from spheroid_node.training.plan import plan, traffic

    compressions = get_args(RoundSpec.model_fields["compression"].annotation)
    memory = plan(run, block, device)
    return Worker(
        memory=memory,
        adamw=memory.adamw,
        total=memory.total,
        sent={dtype: traffic(run, block, dtype).update for dtype in compressions},
        fetched=traffic(run, block).versions,
    )


# --- for people -----------------------------------------------------------------------------------


def _print(report: Report, asked: int | None) -> None:
    console = Console()
    for line in _heading(report, asked):
        console.print(line, highlight=False)
    for table in (_memory_table(report), _traffic_table(report), _card_table(report)):
        console.print()
        console.print(table)
    console.print()
    for line in _notes(report):
        console.print(line, style="dim", highlight=False)


def _heading(report: Report, asked: int | None) -> list[str]:
    model, count = report.model, report.parameters
    return [
        f"run {report.run} {report.run_id}" if asked is None else f"for {decimal(asked)} parameters:",
        f"{model['blocks']} blocks of {model['layers']} layers, width {model['width']}, "
        f"{model['heads']} heads, window {model['window']}, batch {report.batch}",
        f"{decimal(count['all'])} parameters, {decimal(count['block'])} a block, "
        f"{decimal(count['interface'])} in the interface",
    ]


def _columns(report: Report) -> dict[str, str]:
    """The kinds of workers that differ, with the titles of their columns."""
    if report.workers["worst_block"] == report.workers["context"]:
        return {"context": "any block", "full_replica": "whole model"}
    own = {"block_0": "block 0"}
    if report.worst_block:
        own["worst_block"] = f"block {report.worst_block}"
    return {**own, "context": "if context", "full_replica": "whole model"}


def _memory_table(report: Report) -> Table:
    columns = _columns(report)
    workers = [report.workers[name] for name in columns]
    unit, scale = ("GiB", 2**30) if max(worker.total for worker in workers) >= 2**30 else ("MiB", 2**20)
    table = _table(f"memory on {report.device}, {unit}", columns.values())
    rows = {
        "AdamW state": [worker.adamw for worker in workers],
        "copies of other blocks": [worker.memory.upstream for worker in workers],
        "activations": [worker.memory.activations for worker in workers],
        "version begun from": [worker.memory.version for worker in workers],
        "total": [worker.total for worker in workers],
    }
    for title, sizes in rows.items():
        if any(sizes):
            cells = [f"{size / scale:,.2f}" if size else "–" for size in sizes]
            table.add_row(title, *cells, style="bold" if title == "total" else "")
    return table


def _traffic_table(report: Report) -> Table:
    columns = _columns(report)
    workers = [report.workers[name] for name in columns]
    table = _table("traffic of a round", columns.values())
    for dtype in workers[0].sent:
        chosen = dtype == report.compression
        sizes = [decimal(worker.sent[dtype], "B") for worker in workers]
        table.add_row(
            f"sent, {dtype}{' (this run)' if chosen else ''}", *sizes, style="bold" if chosen else ""
        )
    table.add_row("fetched", *(decimal(worker.fetched, "B") for worker in workers), style="bold")
    return table


def _card_table(report: Report) -> Table:
    columns = _columns(report)
    chained = "block_0" in columns
    own = ["blocks"] if chained else []
    table = _table("a GPU of … can own", [*own, columns["context"], columns["full_replica"]])
    for card in report.cards:
        blocks = [_ranges(card.blocks, report.model["blocks"])] if chained else []
        table.add_row(f"{card.gib} GiB", *blocks, _yes(card.context), _yes(card.full_replica))
    return table


def _notes(report: Report) -> list[str]:
    columns = _columns(report)
    worst = f"Block {report.worst_block} needs the most memory of all."
    if_context = "If context: any block, if the run's conditioning were context."
    return [
        *([worst] if "worst_block" in columns else []),
        *([if_context] if "block_0" in columns else []),
        "AdamW state: parameters, gradients and moments, 16 B a parameter.",
        "Activations: what the worst moment of a step needs beside the rest.",
        "Of a GPU's memory 1 GiB is left to what is no tensor.",
    ]


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(title, min_width=24)
    for column in columns:
        table.add_column(column, justify="right", min_width=10)
    return table


def _ranges(blocks: list[int], count: int) -> str:
    """Sorted numbers of blocks, out of ``count``, in few words."""
    if len(blocks) in (0, count):
        return "any" if blocks else "none"
    ends = [block for block in blocks if block + 1 not in blocks]
    starts = [block for block in blocks if block - 1 not in blocks]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in pairs)


def _yes(can: bool) -> str:
    return "yes" if can else "no"
