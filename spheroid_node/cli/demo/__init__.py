"""``spheroid-node demo``: a whole swarm on this machine, from an empty directory to generated text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
from rich.console import Console
from structlog.typing import EventDict

from spheroid_node.cli.demo.processes import Children
from spheroid_node.cli.demo.shape import demo_run, to_toml
from spheroid_node.cli.demo.view import view_for
from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import text_options
from spheroid_node.cli.runner import run_async
from spheroid_node.errors import OutputUnwritable, UsageError
from spheroid_node.run import RunSpec

if TYPE_CHECKING:
    from spheroid_node.cli.demo.session import Result

DEFAULT_PROMPT = "The value of "


@click.command("demo")
@click.option(
    "--replicas",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    metavar="N",
    help="Workers a block, each a process.",
)
@click.option("--minutes", type=float, default=3.0, show_default=True, help="How long to train.")
@text_options
@click.option("--prompt", default=DEFAULT_PROMPT, show_default=True, help="What the text begins with.")
@click.option(
    "--bytes",
    "length",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    metavar="N",
    help="Bytes to generate.",
)
@click.option(
    "--output",
    metavar="DIR",
    help="Where all files go. Default: spheroid-demo/ and the time, here.",
)
def command(
    replicas: int,
    minutes: float,
    data: tuple[str, ...],
    held_out: tuple[str, ...],
    prompt: str,
    length: int,
    output: str | None,
) -> None:
    """Run a whole swarm on this machine, train it, and let it speak.

    Starts a bootstrap and a worker a block on loopback, trains them on text that ships with Python (or on
    --data), writes text with the trained chain, and leaves the model and its learning curve in a directory.
    No process outlives the demo; Ctrl-C ends it at any time.
    """
    from spheroid_node.serving.prompts import prompt_bytes

    if not 0 < minutes <= 7 * 24 * 60:
        raise UsageError(f"--minutes {minutes:g} is no time to train for", "Give 3, for example")
    set_up_logging("auto", listener=own_events)
    run = demo_run(time.time(), data)
    text = prompt_bytes(prompt, run.model.window)

    # Wrong data is found here, before anything is written or started.
    from spheroid_node.training.text import load_text

    load_text(run.data, data, held_out, run.model.window)
    directory = new_directory(output)
    write_run(directory, run)
    with Children(directory / "logs") as children:
        from spheroid_node.cli.demo.session import Plan, Session

        plan = Plan(run, replicas, minutes, data, held_out, text, length, directory)
        view = view_for(Console(stderr=True))
        result = run_async(Session(plan, children, view).run())
    if result is None:
        click.echo(f"Stopped. The logs are in {directory / 'logs'}", err=True)
        raise KeyboardInterrupt
    report(result, directory)


def own_events(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """What the demo itself has to say; the rest of this process is a client like any other."""
    if event["level"] == "info" and not event["event"].startswith("demo."):
        raise structlog.DropEvent
    return event


def new_directory(output: str | None) -> Path:
    """An empty directory for all files of the demo. Raises :class:`OutputUnwritable`."""
    chosen = Path(output) if output else Path("spheroid-demo") / time.strftime("%Y-%m-%d-%H%M%S")
    directory = chosen.expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is not None:
            raise OutputUnwritable(str(directory), "it is not empty")
        (directory / "logs").mkdir()
    except OSError as error:
        raise OutputUnwritable(str(directory), error.strerror or str(error)) from error
    return directory


def write_run(directory: Path, run: RunSpec) -> None:
    """Write the run file that the bootstrap publishes."""
    (directory / "run.toml").write_text(to_toml(run), encoding="utf-8")


def report(result: Result, directory: Path) -> None:
    """The last lines: the text was printed as it came, here is what it took and where the rest is."""
    speed = result.stats.bytes / max(result.stats.total, 1e-9)
    click.echo(f"\n\nWritten by a chain of {result.blocks} processes, a block each: {speed:.0f} bytes/s.")
    first = f"{result.first_ce:.3f} after the first round, " if result.first_ce is not None else ""
    click.echo(f"From-noise CE: {first}{result.final_ce:.3f} at the end (nats a byte of held-out text).")
    click.echo(f"Model:  {directory / 'model'}")
    click.echo(f"Logs:   {directory / 'logs'}")
    click.echo(f"Figure: {directory / 'ce.png'}")
