"""``spheroid-node export``: the swarm's model as a directory."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import peer_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import NodeConfig, resolve, with_peers
from spheroid_node.errors import OutputUnwritable

MODEL_FILES = frozenset({"model.safetensors", "config.json", "README.md"})


@click.command("export")
@click.argument("directory", metavar="DIR")
@peer_options
def command(directory: str, **flags: Any) -> None:
    """Write the swarm's newest model to DIR.

    DIR gets model.safetensors, config.json and a model card; spheroid_node.model.load(DIR) reads it.
    """
    config = with_peers(resolve(flags))
    set_up_logging(config.log_format, level=logging.WARNING)
    output = Path(directory)
    check_free(output)
    versions = run_async(_export(config, output))
    newest = ", ".join(f"{group} {version}" for group, version in versions.items())
    click.echo(f"Wrote {output} (versions: {newest})")


def check_free(directory: Path) -> None:
    """Raise :class:`OutputUnwritable` where no file can be made in ``directory``, or where it holds anything
    but an earlier export."""
    there = next(place for place in (directory, *directory.parents) if place.exists())
    foreign: list[str] = []
    try:
        tempfile.TemporaryFile(dir=there).close()
        if there == directory:
            foreign = sorted({entry.name for entry in directory.iterdir()} - MODEL_FILES)
    except OSError as error:
        raise OutputUnwritable(str(directory), error.strerror or str(error)) from error
    if foreign:
        raise OutputUnwritable(str(directory), f"it holds other files, such as {foreign[0]}")


async def _export(config: NodeConfig, output: Path) -> dict[str, int]:
    from spheroid_node.node.client import fetch_model, swarm_client
    from spheroid_node.training.checkpoint import export_model

    async with swarm_client(config) as client:
        vectors, versions = await fetch_model(client)
        export_model(output, client.run, vectors, versions, None)
    return versions
