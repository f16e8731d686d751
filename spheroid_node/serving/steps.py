"""Pieces of a text, and the arithmetic of one step of a chain over the pieces of several texts at once.

Serving computes in float64. Kernels add up in another order when they are given one position or many, one
text or several, on this processor or that one; what float32 makes of that now and then turns the decision
between two bytes that are nearly as likely. In float64 such differences are 5·10⁸ times smaller, so the text
is the same whatever the route, the decoder and the company it is computed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spheroid_node.model.cache import BlockCache, segments
from spheroid_node.model.composed import ChainState, Hop
from spheroid_node.model.interface import MASK
from spheroid_node.model.randomness import decide, position_noise, scores
from spheroid_node.run import VOCABULARY, RunSpec
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import MAX_FRAME

DTYPE = torch.float64
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
    """How many of the last positions decide their next byte."""
    line: int = -1
    """The line of drafts that the tokens continue; −1: they are known."""
    branch: int = 0
    after: int = 0
    """As in a State: which branch of the line they belong to, and which they go on from."""

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


def split(piece: Piece, size: int) -> Iterator[Piece]:
    """``piece`` in pieces of at most ``size`` positions; those before the first wanted one decide nothing.

    Raises :class:`ValueError` if the masked positions do not fit in one piece after a known byte.
    """
    if piece.masked >= size:
        raise ValueError(f"{piece.masked} masked positions do not fit in a step of {size}")
    last = max(len(piece.tokens) - (size - piece.masked), 0)  # the masked ones go with the last piece
    starts = [*range(0, last, size), last]
    for start, end in zip(starts, [*starts[1:], piece.count], strict=True):
        wanted = max(0, end - max(start, piece.count - piece.decide))
        masked = piece.masked if end == piece.count else 0
        tokens = piece.tokens[start:end]
        yield replace(piece, position=piece.position + start, tokens=tokens, masked=masked, decide=wanted)


def check(piece: Piece, cached: int, limit: int) -> None:
    """Raise :class:`WireError` unless ``piece`` may follow ``cached`` positions in a text of ``limit``."""
    if piece.decide > piece.count:
        raise WireError(ErrorCode.MALFORMED, f"{piece.decide} decisions at {piece.count} positions")
    if piece.position > cached:
        raise WireError(ErrorCode.UNEXPECTED, f"a step at position {piece.position}, {cached} are cached")
    if piece.end > limit:
        raise WireError(ErrorCode.TOO_LARGE, f"a text of {piece.end} positions, limit {limit}")


@dataclass(frozen=True)
class Part:
    """One text's share of a step: its new positions, its cache at this hop, the state of the hop before."""

    piece: Piece
    cache: BlockCache
    incoming: ChainState | None
    """None before block 0, whose state follows from (seed, position) alone."""
    seed: int


@torch.inference_mode()
def advance(hop: Hop, parts: Sequence[Part]) -> list[tuple[ChainState, Tensor]]:
    """One hop for all parts at once: each one's state for the next block, and prior logits [1, n, 256].

    Raises :class:`ValueError` where a cache cannot be taken back so far; then no cache has grown.
    """
    for part in parts:
        part.cache.truncate(part.piece.position)
    device = next(hop.parameters()).device
    tokens = [token for part in parts for token in (*part.piece.tokens, *([MASK] * part.piece.masked))]
    incoming = joined([_incoming(hop, part).to(device) for part in parts])
    counts = [part.piece.count for part in parts]
    texts = segments([part.cache for part in parts], counts)
    state, logits_BTV = hop.step(torch.tensor([tokens], device=device), incoming, texts)
    return [(_cut(state, text.start, text.end), logits_BTV[:, text.start : text.end]) for text in texts]


def _incoming(hop: Hop, part: Part) -> ChainState:
    if part.incoming is not None:
        return part.incoming
    noise_TD = position_noise(part.seed, part.piece.position, part.piece.count, hop.run.model.width)
    return hop.start(noise_TD[None].to(DTYPE))


def joined(states: Sequence[ChainState]) -> ChainState:
    """Several texts' or pieces' positions one after the other: [1, Σ n, ·]."""
    if len(states) == 1:
        return states[0]
    means = [state.log_probs_BTV for state in states if state.log_probs_BTV is not None]
    return ChainState(
        torch.cat([state.hidden_BTD for state in states], dim=1),
        torch.cat([state.noisy_BTD for state in states], dim=1),
        torch.cat(means, dim=1) if means else None,
    )


def _cut(state: ChainState, start: int, end: int) -> ChainState:
    log_probs_BTV = state.log_probs_BTV
    return ChainState(
        state.hidden_BTD[:, start:end],
        state.noisy_BTD[:, start:end],
        None if log_probs_BTV is None else log_probs_BTV[:, start:end],
    )


@torch.inference_mode()
def conclude(
    hop: Hop, piece: Piece, state: ChainState, logits_BTV: Tensor, seed: int, temperature: float
) -> tuple[bytes, Tensor]:
    """After the last block: the decided bytes, and their log-probabilities [decide, 256] on the CPU."""
    log_probs_NV = hop.readout(state, logits_BTV)[0, piece.count - piece.decide :].cpu()
    decided = bytes(
        decide(log_probs_V, seed, piece.first_decided + index, temperature)
        for index, log_probs_V in enumerate(log_probs_NV)
    )
    return decided, log_probs_NV


@dataclass(frozen=True)
class Guess:
    """A block's own idea of the byte at a place."""

    byte: int
    second: int
    """What it would be if not ``byte``."""
    margin: float
    """By how much ``byte`` is ahead, in nats: little where the block is unsure."""


@torch.inference_mode()
def draft(piece: Piece, logits_BTV: Tensor, seed: int, temperature: float) -> Guess:
    """The byte after the last position of ``piece`` as this block alone would decide it.

    With the sampling noise of that position, which the last block will decide with.
    """
    log_probs_V = logits_BTV[0, -1].log_softmax(-1)
    best = scores(log_probs_V, seed, piece.end, temperature).topk(2)
    (byte, second), (first, next_best) = best.indices.tolist(), best.values.tolist()
    return Guess(byte, second, first - next_best)
