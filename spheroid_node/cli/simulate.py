"""``spheroid-node simulate``: a whole swarm in one process, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spheroid_node.cli.options import json_option, text_options

if TYPE_CHECKING:
    from spheroid_node.simulate.swarm import RoundReport, Swarm


@click.command("simulate")
@click.option("--run", "run_file", metavar="FILE", help="Run file. Default: a small run made for this.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=6, show_default=True, help="Machines, two a block or so."
)
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True, help="Rounds to play.")
@click.option(
    "--slow",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="Share of the machines that miss the deadline of a round; drawn anew in each.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=0,
    show_default=True,
    help="Of machines, keys and model: the same seed gives the same model.",
)
@text_options
@json_option
def command(
    run_file: str | None,
    workers: int,
    rounds: int,
    slow: float,
    seed: int,
    data: tuple[str, ...],
    held_out: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a swarm in virtual time: real training and the real rules of a round, made-up machines and links.

    Shows what a deadline, slow machines or more workers do to a run before anybody is asked to join it.
    """
    from spheroid_node.run import RunSpec
    from spheroid_node.simulate.swarm import Swarm, small_run
    from spheroid_node.training.text import load_text

    run = RunSpec.from_toml(Path(run_file)) if run_file else small_run()
    if workers < run.model.blocks:
        raise click.UsageError(f"--workers {workers} is too few: this run has {run.model.blocks} blocks")
    run = run.model_copy(update={"seed": seed})
    text = load_text(run.data, data, held_out, run.model.window)
    swarm = Swarm(run, text, workers, seed, slow)
    show: Callable[[str], object] = (lambda _line: None) if as_json else click.echo
    show(_heading(swarm, text.name))
    reports = []
    for report in swarm.play(rounds):
        reports.append(report)
        show(_line(report))
    click.echo(json.dumps(_summary(swarm, reports), indent=2) if as_json else _closing(swarm, reports))


COLUMNS = "{:>5}  {:>8}  {:>8}  {:>4}  {:>7}  {:>5}  {:>6}  {:>10}  {}"


def _heading(swarm: Swarm, text: str) -> str:
    run = swarm.run
    shape = f"{run.model.blocks} blocks, {len(swarm.workers)} workers, {text}"
    titles = COLUMNS.format(
        "round", "virtual", "accepted", "late", "refused", "steps", "loss", "moved", "CE after each block"
    )
    return f"run {run.name} {run.run_id}: {shape}\n{titles}"


def _line(report: RoundReport) -> str:
    return COLUMNS.format(
        report.round,
        f"{report.seconds:.0f} s",
        f"{report.accepted}/{report.expected}",
        report.late,
        report.refused,
        f"{report.steps:.0f}",
        "–" if report.loss is None else f"{report.loss:.3f}",
        f"{report.bytes_moved / 1e6:.2f} MB",
        " ".join(f"{ce:.3f}" for ce in report.ce),
    )


def _summary(swarm: Swarm, reports: list[RoundReport]) -> dict[str, object]:
    last = reports[-1]
    return {
        "run": swarm.run.run_id,
        "workers": len(swarm.workers),
        "participation": sum(report.participation for report in reports) / len(reports),
        "ce_first": reports[0].ce[-1],
        "ce_last": last.ce[-1],
        "bytes_moved": last.bytes_moved,
        "virtual_seconds": last.seconds,
        "digest": swarm.digest(),
        "rounds": [asdict(report) for report in reports],
    }


def _closing(swarm: Swarm, reports: list[RoundReport]) -> str:
    summary = _summary(swarm, reports)
    return (
        f"participation {summary['participation']:.0%} · CE {summary['ce_last']:.3f} · "
        f"{reports[-1].bytes_moved / 1e6:.2f} MB moved in {reports[-1].seconds:.0f} s of virtual time · "
        f"model {str(summary['digest'])[:16]}"
    )
