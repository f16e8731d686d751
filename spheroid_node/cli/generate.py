"""``spheroid-node generate``: write on from a prompt."""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.cli.options import peer_options
from spheroid_node.cli.runner import run_async
from spheroid_node.config import NodeConfig, resolve, with_peers
from spheroid_node.errors import GenerationEndedEarly, NetworkError, PromptInvalid
from spheroid_node.serving.prompts import prompt_bytes

if TYPE_CHECKING:
    from spheroid_node.run import RunSpec
    from spheroid_node.serving.decoders import DecoderName
    from spheroid_node.serving.finding import ChainFinder, ChainSource
    from spheroid_node.serving.stats import GenerationStats

DECODERS = ("speculative", "autoregressive", "one-sweep")
"""As in serving.decoders, which would import torch just to print ``--help``."""

AT_ONCE = 16
"""Texts of one command that are written at the same time."""


@dataclass(frozen=True)
class Request:
    """One text that was asked for on the command line."""

    prompt: bytes
    count: int
    seed: int
    temperature: float
    decoder: DecoderName


@dataclass(frozen=True)
class Written:
    """What a text cost, and what wrote it."""

    stats: GenerationStats
    source: str


WriteOne = Callable[[Request, BinaryIO], Awaitable[Written]]


@click.command("generate")
@click.argument("prompt", required=False)
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
    "--n",
    "texts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many texts to write on from each prompt, with seeds one after the other.",
)
@click.option("--prompts", metavar="FILE", help="Prompts, a line each, in place of PROMPT.")
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
    default="speculative",
    show_default=True,
    help="Many bytes a sweep through the blocks; one, for the same text; or all in one: quick and rough.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for another machine when one is lost and nobody else has its block.",
)
@click.option("--stats", "show_stats", is_flag=True, help="Print what it cost to stderr.")
@click.option("--checkpoint", metavar="DIR", help="Use this exported model here instead of the swarm.")
@peer_options
def command(
    prompt: str | None,
    count: int,
    texts: int,
    prompts: str | None,
    seed: int | None,
    temperature: float,
    decoder: DecoderName,
    patience: float,
    show_stats: bool,
    checkpoint: str | None,
    **flags: Any,
) -> None:
    """Write on from PROMPT, through the chain of blocks.

    The text goes to stdout as it is decided, without the prompt. PROMPT may be - to read it from stdin.
    Several texts are written at the same time, and each is printed under its prompt once it is complete.
    """
    first = secrets.randbelow(2**32) if seed is None else seed
    requests = [
        Request(given, count, (first + number) % 2**63, temperature, decoder)
        for given in _prompts(prompt, prompts)
        for number in range(texts)
    ]
    config = resolve(flags)
    set_up_logging(config.log_format, level=logging.WARNING)
    if checkpoint is None:
        run_async(_through_swarm(with_peers(config), requests, patience, show_stats))
    else:
        run_async(_through_checkpoint(Path(checkpoint), requests, show_stats))


def _prompts(prompt: str | None, file: str | None) -> list[bytes]:
    """What is wrong with any window is told before a swarm is looked for. Raises :class:`PromptInvalid`."""
    if (prompt is None) == (file is None):
        raise click.UsageError("give either PROMPT or --prompts FILE")
    if file is None:
        given = sys.stdin.buffer.read() if prompt == "-" else prompt
        assert given is not None
        return [prompt_bytes(given, window=sys.maxsize)]
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="--prompts") from error
    found = [prompt_bytes(line, window=sys.maxsize) for line in lines if line.strip()]
    if not found:
        raise PromptInvalid("is missing: the file has no line")
    return found


async def _through_swarm(
    config: NodeConfig, requests: list[Request], patience: float, show_stats: bool
) -> None:
    from spheroid_node.node.client import chain_finder, swarm_client
    from spheroid_node.serving.remote import Generation

    async with swarm_client(config) as client:
        for request in requests:
            prompt_bytes(request.prompt, client.run.model.window)

        async def write_one(request: Request, out: BinaryIO) -> Written:
            finder = chain_finder(
                client,
                Generation(request.seed, request.temperature),
                patience,
                lambda reason: click.echo(f"waiting for another machine: {reason}", err=True),
            )
            stats = await write(client.run, finder, request, out)
            return Written(stats, _source(finder))

        await _write_all(requests, write_one, show_stats)


def _source(finder: ChainFinder) -> str:
    """What wrote a text: versions, links, and whether machines were lost on the way."""
    if finder.chain is None:
        return "no chain was needed"
    ways = finder.chain.ways
    links = ways[0] if len({*ways}) == 1 else " → ".join(ways)
    lost = f"; a chain was lost {finder.found - 1} times" if finder.found > 1 else ""
    return f"versions: {finder.versions}; links: {links}{lost}"


async def _through_checkpoint(directory: Path, requests: list[Request], show_stats: bool) -> None:
    from spheroid_node.model import load
    from spheroid_node.serving.local import LocalSource, hops_of

    model = load(directory)
    hops = hops_of(model)
    for request in requests:
        prompt_bytes(request.prompt, model.run.model.window)

    async def write_one(request: Request, out: BinaryIO) -> Written:
        source = LocalSource(model, hops, request.seed, request.temperature)
        return Written(await write(model.run, source, request, out), f"model: {directory}")

    await _write_all(requests, write_one, show_stats)


async def _write_all(requests: list[Request], write_one: WriteOne, show_stats: bool) -> None:
    """One text as it is decided; several at the same time, each printed when those before it are."""
    out = sys.stdout.buffer
    if len(requests) == 1:
        written = await write_one(requests[0], out)
        if show_stats:
            _print_stats(written, requests[0])
        return
    turn = asyncio.Semaphore(AT_ONCE)

    async def apart(request: Request) -> tuple[io.BytesIO, Written]:
        text = io.BytesIO()
        async with turn:
            return text, await write_one(request, text)

    tasks = [asyncio.create_task(apart(request)) for request in requests]
    try:
        for request, task in zip(requests, tasks, strict=True):
            text, written = await task
            out.write(b"==> " + request.prompt + b" <==\n" + text.getvalue() + b"\n\n")
            out.flush()
            if show_stats:
                _print_stats(written, request)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def write(run: RunSpec, source: ChainSource[Any], request: Request, out: BinaryIO) -> GenerationStats:
    """Stream a text to ``out``. Raises :class:`GenerationEndedEarly` after what could be decided."""
    from spheroid_node.serving.finding import write_on
    from spheroid_node.serving.stats import Measure
    from spheroid_node.serving.utf8 import Utf8Stream

    # Bytes, since a model's text need not fit the encoding of this terminal.
    text, measure = Utf8Stream(), Measure()
    produced = 0
    try:
        async for decided in write_on(
            source, request.decoder, run, request.prompt, request.count, measure.chain
        ):
            produced += len(decided)
            out.write(text.feed(decided).encode())
            out.flush()
    except NetworkError as error:
        if not produced:
            raise
        raise GenerationEndedEarly(error.problem, produced) from error
    finally:
        out.write(text.finish().encode() + (b"\n" if out.isatty() else b""))
        out.flush()
    return measure.stats


def _print_stats(written: Written, request: Request) -> None:
    lines = [
        *written.stats.lines(),
        f"seed {request.seed}, temperature {request.temperature:g}",
        written.source,
    ]
    for line in lines:
        click.echo(line, err=True)
