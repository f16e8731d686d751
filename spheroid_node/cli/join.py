"""``spheroid-node join``: own a replica of a block."""

from __future__ import annotations

import sys
from typing import Any

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import (
    block_choice,
    device_option,
    listen_options,
    log_option,
    peer_options,
    speed_options,
    state_option,
    text_options,
)
from spheroid_node.cli.runner import run_async
from spheroid_node.cli.status_line import StatusLine
from spheroid_node.config import resolve, with_peers


@click.command("join")
@click.option(
    "--block",
    callback=block_choice,
    default="auto",
    metavar="N|auto",
    show_default=True,
    help="Block to own; auto takes the one that needs a replica most.",
)
@peer_options
@state_option
@text_options
@device_option
@speed_options
@listen_options
@click.option(
    "--data-port",
    type=int,
    metavar="N",
    help="TCP port of updates, versions and prompts. Default: any free one.",
)
@click.option(
    "--announce-data-port",
    type=int,
    metavar="N",
    help="Port others should dial, where a router forwards another one to --data-port.",
)
@click.option(
    "--relay",
    is_flag=True,
    default=None,
    help="Others cannot dial this machine: be reached through nodes that they can dial.",
)
@click.option(
    "--cache-mb", type=int, metavar="N", help="Memory for the caches of texts that are served. Default: 1024."
)
@log_option
def command(block: int | None, **flags: Any) -> None:
    """Own a replica of a block: train it, share it, serve it.

    Ctrl-C once finishes and leaves; twice leaves now. What this node must remember is in its state directory,
    so that it goes on from there when it is started again.
    """
    config = with_peers(resolve(flags))
    with StatusLine(shown=config.log_format == "auto" and sys.stderr.isatty()) as status_line:
        set_up_logging(config.log_format, listener=status_line.hear)
        from spheroid_node.node.daemon import run_node

        run_async(run_node(config, block))
