"""A chain inside this process: what a swarm's chain of the same versions must equal."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from spheroid_node.model.composed import ChainState, ComposedModel, Hop
from spheroid_node.serving.chain import ChainLost, Sweep
from spheroid_node.serving.engine import for_serving
from spheroid_node.serving.judging import Judge
from spheroid_node.serving.states import rounded
from spheroid_node.serving.steps import Part, Piece, advance, check, conclude, draft, joined
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import MAX_POSITIONS

T = TypeVar("T")
DRAFTS = 8
"""A line of so many costs the least here, where a traversal costs no more than its computation."""


def hops_of(model: ComposedModel) -> list[Hop]:
    """A copy of all hops of ``model`` in the precision of serving."""
    own = copy.deepcopy(model)
    return [for_serving(own.hop(block)) for block in range(model.run.model.blocks)]


class LocalChain:
    """All hops of ``model``, one text. See :class:`spheroid_node.serving.chain.Chain`."""

    def __init__(
        self,
        model: ComposedModel,
        seed: int = 0,
        temperature: float = 0.0,
        logits: bool = False,
        hops: Sequence[Hop] | None = None,
    ) -> None:
        """``hops``: those of :func:`hops_of`, where several texts share them."""
        self._run = model.run
        self._hops = hops_of(model) if hops is None else hops
        self._caches = [hop.block.new_cache() for hop in self._hops]
        self._seed, self._temperature, self._logits = seed, temperature, logits
        self._turn = asyncio.Lock()

    async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
        piece = Piece(position, tokens, masked, decide)
        try:
            check(piece, self._caches[0].length, MAX_POSITIONS)
        except WireError as error:
            raise ChainLost(None, error.code, error.detail) from error
        return await self._in_turn(lambda: self._sweep(piece))

    async def write(self, position: int, tokens: bytes, count: int, drafts: int = 0) -> AsyncIterator[Sweep]:
        """As a remote chain writes, but a line of ``drafts`` at a time (0: :data:`DRAFTS`)."""
        judge, line = Judge(), 0
        piece = Piece(position, tokens)
        while count:
            limit = min(drafts or DRAFTS, count - 1)
            found = await self._in_turn(partial(self._line, piece, limit, judge))
            sweep = Sweep(found.position, found.tokens, found.logits, found.seconds, line)
            line, count = line + 1, count - len(found.tokens)
            piece = Piece(judge.decided - 1, found.tokens[-1:], line=line)
            yield sweep

    async def close(self) -> None:
        self._caches = [hop.block.new_cache() for hop in self._hops]

    async def _in_turn(self, work: Callable[[], T]) -> T:
        async with self._turn:
            return await asyncio.to_thread(work)

    def _sweep(self, piece: Piece) -> Sweep:
        seconds = []
        state: ChainState | None = None
        for block in range(len(self._hops)):
            began = time.perf_counter()
            state, logits_BTV = self._hop(block, piece, state)
            seconds.append(time.perf_counter() - began)
        assert state is not None
        decided, log_probs = self._conclude(piece, state, logits_BTV)
        return Sweep(
            piece.first_decided, decided, log_probs.numpy() if self._logits else None, tuple(seconds)
        )

    def _line(self, known: Piece, limit: int, judge: Judge) -> Sweep:
        """The bytes that are final after ``limit`` drafts of block 0 and one traversal of all blocks."""
        began = time.perf_counter()
        drafted, tokens = [self._hop(0, known, None)], known.tokens
        for _ in range(limit):
            guess = draft(Piece(known.position, tokens), drafted[-1][1], self._seed, self._temperature).byte
            drafted.append(self._hop(0, Piece(known.position + len(tokens), bytes([guess])), None))
            tokens += bytes([guess])
        piece = Piece(known.position, tokens, decide=limit + 1, line=0)
        state, logits_BTV = joined([state for state, _ in drafted]), torch.cat([x for _, x in drafted], 1)
        seconds = [time.perf_counter() - began]
        for block in range(1, len(self._hops)):
            began = time.perf_counter()
            state, logits_BTV = self._hop(block, piece, state)
            seconds.append(time.perf_counter() - began)
        decided, log_probs = self._conclude(piece, state, logits_BTV)
        final = judge.judge(piece, decided)
        logits = log_probs[: len(final)].numpy() if self._logits else None
        return Sweep(piece.first_decided, final, logits, tuple(seconds))

    def _hop(self, block: int, piece: Piece, incoming: ChainState | None) -> tuple[ChainState, Tensor]:
        if incoming is not None:
            incoming = rounded(self._run, piece, incoming)
        part = Part(piece, self._caches[block], incoming, self._seed)
        ((state, logits_BTV),) = advance(self._hops[block], [part])
        return state, logits_BTV

    def _conclude(self, piece: Piece, state: ChainState, logits_BTV: Tensor) -> tuple[bytes, Tensor]:
        return conclude(self._hops[-1], piece, state, logits_BTV, self._seed, self._temperature)


class LocalSource:
    """Chains of ``model`` in this process, for :func:`spheroid_node.serving.finding.write_on`."""

    def __init__(self, model: ComposedModel, hops: Sequence[Hop], seed: int, temperature: float) -> None:
        self._model, self._seed, self._temperature = model, seed, temperature
        self._hops = hops

    async def open(self) -> LocalChain:
        return LocalChain(self._model, self._seed, self._temperature, hops=self._hops)

    def lost(self, chain: LocalChain, error: ChainLost) -> None:
        raise error
