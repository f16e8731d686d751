"""Decoders: how a text grows by sweeps through a chain (design.md, section 7)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, get_args

from spheroid_node.run import RunSpec
from spheroid_node.serving.chain import Chain
from spheroid_node.serving.steps import positions_per_step

DecoderName = Literal["speculative", "autoregressive", "one-sweep"]
DECODERS: tuple[str, ...] = get_args(DecoderName)


def decode(name: DecoderName, run: RunSpec, chain: Chain, prompt: bytes, count: int) -> AsyncIterator[bytes]:
    """``count`` bytes after ``prompt`` by the decoder called ``name``, as they are decided."""
    if name == "one-sweep":
        return one_sweep(chain, prompt, count, positions_per_step(run))
    if name == "autoregressive":
        return autoregressive(chain, prompt, count)
    return speculative(chain, prompt, count)


async def speculative(chain: Chain, prompt: bytes, count: int) -> AsyncIterator[bytes]:
    """The bytes of :func:`autoregressive`, many a traversal of the chain."""
    if count:
        async for sweep in chain.write(0, prompt, count):
            yield sweep.tokens


async def autoregressive(chain: Chain, prompt: bytes, count: int) -> AsyncIterator[bytes]:
    """One byte a sweep. Raises :class:`ChainLost`; what was yielded before stays valid."""
    position, tokens = 0, prompt
    for _ in range(count):
        sweep = await chain.sweep(position, tokens)
        position, tokens = sweep.position, sweep.tokens
        yield tokens


async def one_sweep(chain: Chain, prompt: bytes, count: int, window: int) -> AsyncIterator[bytes]:
    """All bytes in one sweep, ``window`` at most; a further sweep follows with the decided bytes known.

    The bytes of a sweep are decided independently of each other (paper.md, section 3), so this is fast and,
    beyond the first byte, worse than :func:`autoregressive`.
    """
    position, tokens = 0, prompt
    while count > 0:
        decide = min(count, window)
        # The byte after the last known one needs no masked position, hence one less.
        sweep = await chain.sweep(position, tokens, masked=decide - 1, decide=decide)
        position, tokens = sweep.position, sweep.tokens
        count -= decide
        yield tokens
