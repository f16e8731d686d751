"""``spheroid-node gateway``: the swarm over HTTP."""

from __future__ import annotations

from typing import Any

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import log_option, peer_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import resolve, with_peers
from spheroid_node.errors import ExtraMissing

PACKAGES = {"starlette", "uvicorn", "sse_starlette"}
"""What the extra ``gateway`` brings."""


@click.command("gateway")
@click.option(
    "--host",
    "http_host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 lets everyone who can reach this machine generate.",
)
@click.option(
    "--port",
    "http_port",
    type=click.IntRange(0, 65_535),
    metavar="N",
    default=8080,
    show_default=True,
    help="TCP port to listen on; 0 is any free one.",
)
@peer_options
@log_option
def command(http_host: str, http_port: int, **flags: Any) -> None:
    """Serve the swarm over HTTP: an OpenAI-style API, a page, and metrics.

    POST /v1/completions generates, GET /v1/models names the run, GET / shows the swarm in a browser, GET
    /v1/swarm the same as JSON, GET /metrics is for Prometheus.
    """
    config = resolve(flags)
    set_up_logging(config.log_format)
    try:
        from spheroid_node.gateway.serve import serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        raise ExtraMissing("gateway", package.replace("_", "-")) from error
    run_async(serve(with_peers(config), http_host, http_port))
