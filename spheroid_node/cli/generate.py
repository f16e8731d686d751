"""``spheroid-node generate``: write on from a prompt."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import peer_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import NodeConfig, resolve, with_peers
from spheroid_node.errors import GenerationEndedEarly
from spheroid_node.serving.prompts import prompt_bytes

if TYPE_CHECKING:
    from spheroid_node.run import RunSpec
    from spheroid_node.serving.chain import Chain
    from spheroid_node.serving.decoders import DecoderName
    from spheroid_node.serving.stats import GenerationStats

DECODERS = ("autoregressive", "one-sweep")
"""As in serving.decoders, which would import torch just to print ``--help``."""


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    prompt: bytes
    count: int
    seed: int
    temperature: float
    decoder: DecoderName


@click.command("generate")
@click.argument("prompt")
@click.option(
    "-n",
    "--bytes",
    "count",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    help="How many bytes to write.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="The same seed and versions give the same text. Default: a new one each time; --stats shows it.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.8,
    show_default=True,
    help="0 always takes the most likely byte.",
)
@click.option(
    "--decode",
    "decoder",
    type=click.Choice(DECODERS),
    default="autoregressive",
    show_default=True,
    help="One byte a sweep through the blocks, or all bytes in one sweep: quick and rough.",
)
@click.option("--stats", "show_stats", is_flag=True, help="Print what it cost to stderr.")
@click.option("--checkpoint", metavar="DIR", help="Use this exported model here instead of the swarm.")
@peer_options
def command(
    prompt: str,
    count: int,
    seed: int | None,
    temperature: float,
    decoder: DecoderName,
    show_stats: bool,
    checkpoint: str | None,
    **flags: Any,
) -> None:
    """Write on from PROMPT, through the chain of blocks.

    The text goes to stdout as it is decided, without the prompt. PROMPT may be - to read it from stdin.
    """
    given = sys.stdin.buffer.read() if prompt == "-" else prompt
    request = Request(
        # What is wrong with any window is told before a swarm is looked for.
        prompt_bytes(given, window=sys.maxsize),
        count,
        secrets.randbelow(2**32) if seed is None else seed,
        temperature,
        decoder,
    )
    config = resolve(flags)
    set_up_logging(config.log_format, level=logging.WARNING)
    if checkpoint is None:
        run_async(_through_swarm(with_peers(config), request, show_stats))
    else:
        run_async(_through_checkpoint(Path(checkpoint), request, show_stats))


async def _through_swarm(config: NodeConfig, request: Request, show_stats: bool) -> None:
    from spheroid_node.node.client import swarm_client
    from spheroid_node.serving.remote import Generation, find_chain

    async with swarm_client(config) as client:
        prompt_bytes(request.prompt, client.run.model.window)
        chain = await find_chain(
            client.directory,
            client.run,
            lambda address: client.dial(address, "hop"),
            Generation(request.seed, request.temperature),
        )
        versions = " ".join(str(hop.version) for hop in chain.route.hops)
        async with _closing(chain):
            stats = await write(client.run, chain, request)
    if show_stats:
        _print_stats(stats, request, f"versions: interface {chain.route.interface}, blocks {versions}")


async def _through_checkpoint(directory: Path, request: Request, show_stats: bool) -> None:
    from spheroid_node.model import load
    from spheroid_node.serving.local import LocalChain

    model = load(directory)
    prompt_bytes(request.prompt, model.run.model.window)
    async with _closing(LocalChain(model, request.seed, request.temperature)) as chain:
        stats = await write(model.run, chain, request)
    if show_stats:
        _print_stats(stats, request, f"model: {directory}")


async def write(run: RunSpec, chain: Chain, request: Request) -> GenerationStats:
    """Stream the text to stdout. Raises :class:`GenerationEndedEarly` after what could be decided."""
    from spheroid_node.serving.chain import ChainLost
    from spheroid_node.serving.decoders import decode
    from spheroid_node.serving.stats import MeasuredChain
    from spheroid_node.serving.utf8 import Utf8Stream

    # Bytes, since a model's text need not fit the encoding of this terminal.
    out, text, measured = sys.stdout.buffer, Utf8Stream(), MeasuredChain(chain)
    produced = 0
    try:
        async for decided in decode(request.decoder, run, measured, request.prompt, request.count):
            produced += len(decided)
            out.write(text.feed(decided).encode())
            out.flush()
    except ChainLost as error:
        raise GenerationEndedEarly(str(error), produced) from error
    finally:
        out.write(text.finish().encode() + (b"\n" if sys.stdout.isatty() else b""))
        out.flush()
    return measured.stats


@asynccontextmanager
async def _closing(chain: Chain) -> AsyncIterator[Chain]:
    try:
        yield chain
    finally:
        await chain.close()


def _print_stats(stats: GenerationStats, request: Request, source: str) -> None:
    lines = [*stats.lines(), f"seed {request.seed}, temperature {request.temperature:g}", source]
    for line in lines:
        click.echo(line, err=True)
