"""``spheroid-node simulate``: a whole swarm in one process, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spheroid_node.cli.export import check_free
from spheroid_node.cli.options import json_option, text_options

if TYPE_CHECKING:
    from spheroid_node.simulate.methods import Method
    from spheroid_node.simulate.regime import Regime
    from spheroid_node.simulate.swarm import RoundReport, Swarm

WORKERS = 6


@click.command("simulate")
@click.option("--run", "run_file", metavar="FILE", help="Run file. Default: a small run made for this.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help=f"Machines. Default: {WORKERS}.")
@click.option("--replicas", type=click.IntRange(min=1), metavar="N", help="Instead: machines a block.")
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True, help="Rounds to play.")
@click.option(
    "--regime",
    default="lockstep",
    show_default=True,
    metavar="NAME|FILE",
    help="Machines and links: lockstep, mild, wan, bad-edge, or a TOML file.",
)
@click.option(
    "--method",
    default="blocktrain",
    show_default=True,
    metavar="NAME",
    help="How the model is trained: blocktrain, or what it is compared with (end-to-end, fedavg, diloco …).",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=0,
    show_default=True,
    help="Of machines, keys and model: the same seed gives the same model.",
)
@click.option("--dry", is_flag=True, help="The rounds alone, without learning: for thousands of machines.")
@click.option("--export", "directory", metavar="DIR", help="Write the model to DIR after the last round.")
@text_options
@json_option
def command(
    run_file: str | None,
    workers: int | None,
    replicas: int | None,
    rounds: int,
    regime: str,
    method: str,
    seed: int,
    dry: bool,
    directory: str | None,
    data: tuple[str, ...],
    held_out: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a swarm in virtual time: real training and the real rules of a round, made-up machines and links.

    Shows what a deadline, slow machines or more workers do to a run before anybody is asked to join it.
    """
    if workers and replicas:
        raise click.UsageError("--workers and --replicas say the same: give one of them")
    if dry and directory:
        raise click.UsageError("--dry learns nothing: there is no model to --export")
    output = Path(directory) if directory else None
    if output:
        check_free(output)
    chosen_regime, chosen_method = _regime(regime), _method(method)
    from spheroid_node.run import RunSpec
    from spheroid_node.simulate.dry import wide_run
    from spheroid_node.simulate.swarm import Swarm, small_run
    from spheroid_node.training.text import load_text

    if run_file:
        run = RunSpec.from_toml(Path(run_file))
    else:
        run = wide_run(workers or WORKERS) if dry else small_run()
    workers = replicas * run.model.blocks if replicas else workers or WORKERS
    if workers < run.model.blocks:
        raise click.UsageError(f"--workers {workers} is too few: this run has {run.model.blocks} blocks")
    played, trained = chosen_method.scheduled(run, workers), chosen_method.workers(workers)
    text = None if dry else load_text(run.data, data, held_out, run.model.window)
    swarm = Swarm(played, text, trained, seed, chosen_regime, chosen_method)
    show: Callable[[str], object] = (lambda _line: None) if as_json else click.echo
    show(_heading(swarm, regime))
    reports = []
    for report in swarm.play(rounds):
        reports.append(report)
        show(_line(report))
    if as_json:
        click.echo(json.dumps(_summary(swarm, regime, reports), indent=2))
    else:
        click.echo(_closing(swarm, reports))
    if output:
        versions = _export(swarm, output)
        show(f"Wrote {output} (versions: {versions})")


def _regime(name: str) -> Regime:
    from spheroid_node.simulate.regime import load_regime

    try:
        return load_regime(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--regime") from error


def _method(name: str) -> Method:
    from spheroid_node.simulate.methods import METHODS

    if name not in METHODS:
        known = ", ".join(METHODS)
        raise click.BadParameter(
            f"there is no method {name!r}; the methods are {known}", param_hint="--method"
        )
    return METHODS[name]


COLUMNS = "{:>5}  {:>9}  {:>11}  {:>5}  {:>7}  {:>5}  {:>6}  {:>6}  {:>12}  {}"


def _heading(swarm: Swarm, regime: str) -> str:
    run = swarm.run
    learning = swarm.text.name if swarm.text else "dry: nothing is learnt"
    parts = (
        f"{run.model.blocks} blocks",
        f"{len(swarm.workers)} workers",
        swarm.method.name,
        regime,
        learning,
    )
    titles = COLUMNS.format(
        "round", "virtual", "accepted", "late", "refused", "away", "steps", "loss", "moved",
        "CE after each block" if swarm.text else "",
    )  # fmt: skip
    return f"run {run.name} {run.run_id}: {', '.join(parts)}\n{titles.rstrip()}"


def _line(report: RoundReport) -> str:
    return COLUMNS.format(
        report.round,
        f"{report.seconds:.0f} s",
        f"{report.accepted}/{report.expected}",
        report.late,
        report.refused,
        report.away,
        f"{report.steps:.0f}",
        "–" if report.loss is None else f"{report.loss:.3f}",
        f"{report.bytes_moved / 1e6:.2f} MB",
        " ".join(f"{ce:.3f}" for ce in report.ce),
    ).rstrip()


def _summary(swarm: Swarm, regime: str, reports: list[RoundReport]) -> dict[str, object]:
    first, last = reports[0], reports[-1]
    return {
        "run": swarm.run.run_id,
        "regime": regime,
        "method": swarm.method.name,
        "workers": len(swarm.workers),
        "participation": _participation(reports),
        "ce_first": first.ce_readout,
        "ce_last": last.ce_readout,
        "tokens": last.tokens,
        "bytes_moved": last.bytes_moved,
        "virtual_seconds": last.seconds,
        "digest": swarm.digest(),
        "rounds": [asdict(report) for report in reports],
    }


def _closing(swarm: Swarm, reports: list[RoundReport]) -> str:
    last = reports[-1]
    parts = [
        f"participation {_participation(reports):.0%}",
        f"{last.bytes_moved / 1e6:.2f} MB moved in {last.seconds:.0f} s of virtual time",
        f"model {swarm.digest()[:16]}",
    ]
    if last.ce_readout is not None:
        parts.insert(1, f"CE {last.ce_readout:.3f}")
    return " · ".join(parts)


def _export(swarm: Swarm, output: Path) -> str:
    """Write the model as it is now; returns its versions in words."""
    from spheroid_node.training.checkpoint import export_model

    parts = swarm.together()
    versions = {group: version.base.version for group, version in parts.items()}
    vectors = {group: version.vector for group, version in parts.items()}
    evaluation = swarm.evaluate()
    assert evaluation is not None
    measured = asdict(evaluation)
    measured = {"ce_by_block": measured.pop("ce"), "ce": measured.pop("ce_readout"), **measured}
    trained = f"trained in a simulated swarm (`spheroid-node simulate --method {swarm.method.name}`):\n"
    export_model(output, swarm.run, vectors, versions, measured, trained + swarm.method.summary)
    return ", ".join(f"{group} {version}" for group, version in versions.items())


def _participation(reports: list[RoundReport]) -> float:
    return sum(report.participation for report in reports) / len(reports)
