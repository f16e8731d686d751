"""``spheroid-node bootstrap``: the peer that publishes a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import listen_options, log_option, state_option
from spheroid_node.cli.runner import run_async
from spheroid_node.config import resolve
from spheroid_node.run import RunSpec


@click.command("bootstrap")
@click.option(
    "--run", "run_file", required=True, metavar="FILE", help="Run file (TOML), as in bootstrap/runs/."
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="ADDRESS",
    help="Another bootstrap of the same swarm; without it this one starts a swarm of its own.",
)
@listen_options
@state_option
@log_option
def command(run_file: str, peers: tuple[str, ...], **flags: Any) -> None:
    """Publish a run and be the peer that others enter its swarm through.

    Prints the line that volunteers join with, and keeps it in join.txt in the state directory. The peer keeps
    its key across restarts, and its port where --port names none and nobody has taken it.
    """
    run = RunSpec.from_toml(Path(run_file))
    config = resolve(flags | {"peers": peers}, role="bootstrap")
    if not peers:
        # Those of the environment and the config file are for nodes, and may well be this very bootstrap.
        config = config.model_copy(update={"peers": ()})
    set_up_logging(config.log_format)
    from spheroid_node.node.bootstrap import run_bootstrap

    run_async(run_bootstrap(config, run))
