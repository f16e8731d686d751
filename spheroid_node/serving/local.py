"""A chain inside this process: what a swarm's chain of the same versions must equal."""

from __future__ import annotations

import asyncio
import time

from spheroid_node.model.composed import ChainState, ComposedModel
from spheroid_node.serving.chain import ChainLost, Sweep
from spheroid_node.serving.steps import Piece, advance, check, conclude
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import MAX_POSITIONS


class LocalChain:
    """All hops of ``model``, one text. See :class:`spheroid_node.serving.chain.Chain`."""

    def __init__(
        self, model: ComposedModel, seed: int = 0, temperature: float = 0.0, logits: bool = False
    ) -> None:
        self._hops = [model.hop(block) for block in range(model.run.model.blocks)]
        self._caches = [hop.block.new_cache() for hop in self._hops]
        self._seed, self._temperature, self._logits = seed, temperature, logits
        self._turn = asyncio.Lock()

    async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
        piece = Piece(position, tokens, masked, decide)
        async with self._turn:
            return await asyncio.to_thread(self._sweep, piece)

    async def close(self) -> None:
        self._caches = [hop.block.new_cache() for hop in self._hops]

    def _sweep(self, piece: Piece) -> Sweep:
        try:
            check(piece, self._caches[0].length, MAX_POSITIONS)
        except WireError as error:
            raise ChainLost(None, error.code, error.detail) from error
        state: ChainState | None = None
        seconds = []
        for hop, cache in zip(self._hops, self._caches, strict=True):
            began = time.perf_counter()
            state, logits_BTV = advance(hop, cache, piece, state, self._seed)
            seconds.append(time.perf_counter() - began)
        assert state is not None
        decided, log_probs = conclude(self._hops[-1], piece, state, logits_BTV, self._seed, self._temperature)
        return Sweep(
            piece.first_decided, decided, log_probs.numpy() if self._logits else None, tuple(seconds)
        )
