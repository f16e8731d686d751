"""``spheroid-node status``: who is in the swarm and how it learns."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from spheroid_node.cli.live import render
from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import json_option, peer_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import NodeConfig, resolve, with_peers

if TYPE_CHECKING:
    from spheroid_node.node.client import Client
    from spheroid_node.node.snapshot import Snapshot

WATCH_SECONDS = 2.0


@click.command("status")
@peer_options
@click.option("--watch", is_flag=True, help="Go on showing, until Ctrl-C.")
@json_option
def command(watch: bool, as_json: bool, **flags: Any) -> None:
    """Show who is in the swarm and how it learns.

    With --json one object, or with --watch one object a line.
    """
    config = with_peers(resolve(flags))
    set_up_logging(config.log_format, level=logging.WARNING)
    run_async(_show(config, watch, as_json))


async def _show(config: NodeConfig, watch: bool, as_json: bool) -> None:
    from spheroid_node.node.client import swarm_client

    async with swarm_client(config) as client:
        if not watch:
            _print(await _collect(client), as_json, Console())
        elif as_json:
            while True:
                click.echo(json.dumps((await _collect(client)).as_json()))
                await asyncio.sleep(WATCH_SECONDS)
        else:
            await _watch(client)


async def _watch(client: Client) -> None:
    from rich.live import Live

    from spheroid_node.node.snapshot import Curve

    console = Console()
    curve = Curve()
    if not console.is_terminal:
        while True:
            _print(await _collect(client), False, console)
            await asyncio.sleep(WATCH_SECONDS)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            snapshot = await _collect(client)
            curve.add(snapshot)
            live.update(render(snapshot, list(curve.by_round().values())), refresh=True)
            await asyncio.sleep(WATCH_SECONDS)


async def _collect(client: Client) -> Snapshot:
    from spheroid_node.node.snapshot import collect

    return await collect(client.directory, client.run, client.dht.time())


def _print(snapshot: Snapshot, as_json: bool, console: Console) -> None:
    if as_json:
        click.echo(json.dumps(snapshot.as_json(), indent=2))
    else:
        console.print(render(snapshot))
