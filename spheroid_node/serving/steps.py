"""The arithmetic of one step of a chain, shared by the hop server and the local chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spheroid_node.model.block import BlockCache
from spheroid_node.model.composed import ChainState, Hop
from spheroid_node.model.interface import MASK
from spheroid_node.model.randomness import decide, position_noise
from spheroid_node.run import VOCABULARY, RunSpec
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import MAX_FRAME

FLOAT_BYTES = 4
FRAME_OVERHEAD = 64 * 1024
"""Room in a frame for everything of a State but its tensors."""


@dataclass(frozen=True)
class Piece:
    """Consecutive new positions of a text: known bytes, then masked ones."""

    position: int
    tokens: bytes
    masked: int = 0
    decide: int = 1

    @property
    def count(self) -> int:
        return len(self.tokens) + self.masked

    @property
    def end(self) -> int:
        return self.position + self.count

    @property
    def first_decided(self) -> int:
        """Index in the text of the first byte that this piece decides."""
        return self.end - self.decide + 1


def positions_per_step(run: RunSpec) -> int:
    """Positions whose State and Result fit in a frame, and at most a window."""
    values = 2 * run.model.width + (VOCABULARY if run.learning.readout == "mean" else 0)
    fit = (MAX_FRAME - FRAME_OVERHEAD) // (FLOAT_BYTES * max(values, VOCABULARY))
    return max(1, min(fit, run.model.window))


def split(piece: Piece, size: int) -> Iterator[tuple[Piece, int]]:
    """``piece`` in pieces of at most ``size`` positions, each with how many of its decisions count.

    Every piece must decide something; a piece before the first wanted position has a count of 0.
    Raises :class:`ValueError` if the masked positions do not fit in one piece after a known byte.
    """
    if piece.masked >= size:
        raise ValueError(f"{piece.masked} masked positions do not fit in a step of {size}")
    last = max(len(piece.tokens) - (size - piece.masked), 0)  # the masked ones go with the last piece
    starts = [*range(0, last, size), last]
    for start, end in zip(starts, [*starts[1:], piece.count], strict=True):
        wanted = max(0, end - max(start, piece.count - piece.decide))
        masked = piece.masked if end == piece.count else 0
        yield Piece(piece.position + start, piece.tokens[start:end], masked, max(wanted, 1)), wanted


def check(piece: Piece, cached: int, limit: int) -> None:
    """Raise :class:`WireError` unless ``piece`` may follow ``cached`` positions in a text of ``limit``."""
    if piece.decide > piece.count:
        raise WireError(ErrorCode.MALFORMED, f"{piece.decide} decisions at {piece.count} positions")
    if piece.position > cached:
        raise WireError(ErrorCode.UNEXPECTED, f"a step at position {piece.position}, {cached} are cached")
    if piece.end > limit:
        raise WireError(ErrorCode.TOO_LARGE, f"a text of {piece.end} positions, limit {limit}")


@torch.inference_mode()
def advance(
    hop: Hop, cache: BlockCache, piece: Piece, incoming: ChainState | None, seed: int
) -> tuple[ChainState, Tensor]:
    """One hop: the state for the next block and this block's prior logits [1, n, 256].

    ``incoming`` is None before block 0, whose state follows from (seed, position) alone.
    """
    cache.truncate(piece.position)
    device = next(hop.parameters()).device
    tokens_BT = torch.tensor([[*piece.tokens, *([MASK] * piece.masked)]], device=device)
    if incoming is None:
        width = hop.run.model.width
        incoming = hop.start(position_noise(seed, piece.position, piece.count, width)[None].to(device))
    incoming = ChainState(
        incoming.hidden_BTD.to(device),
        incoming.noisy_BTD.to(device),
        None if incoming.log_probs_BTV is None else incoming.log_probs_BTV.to(device),
    )
    return hop.step(tokens_BT, incoming, cache)


@torch.inference_mode()
def conclude(
    hop: Hop, piece: Piece, state: ChainState, logits_BTV: Tensor, seed: int, temperature: float
) -> tuple[bytes, Tensor]:
    """After the last block: the decided bytes, and their log-probabilities [decide, 256] on the CPU."""
    log_probs_NV = hop.readout(state, logits_BTV)[0, -piece.decide :].float().cpu()
    decided = bytes(
        decide(log_probs_V, seed, piece.first_decided + index, temperature)
        for index, log_probs_V in enumerate(log_probs_NV)
    )
    return decided, log_probs_NV
