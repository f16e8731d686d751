"""What a decoder needs of a chain of blocks, whether in this process or over the network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spheroid_node.wire.codes import ErrorCode


@dataclass(frozen=True)
class Sweep:
    """What one traversal of the chain brought."""

    position: int
    """Index in the text of the first decided byte."""
    tokens: bytes
    """The decided bytes."""
    logits: NDArray[np.float32] | None
    """[len(tokens), 256]: log-probabilities of the read-out, where the chain was opened with logits."""
    seconds: tuple[float, ...]
    """Compute time of each hop."""
    line: int = -1
    """The line of drafts that these bytes end or are a part of; −1: the answer to a sweep."""


class ChainLost(Exception):
    """A chain that answered once and does not any more. What it decided before stays valid.

    ``block`` is the hop that was lost, where it is known.
    """

    def __init__(self, block: int | None, code: ErrorCode, detail: str = "") -> None:
        hop = "the chain" if block is None else f"block {block}"
        super().__init__(f"{hop} was lost ({code}{': ' + detail if detail else ''})")
        self.block = block
        self.code = code


class Chain(Protocol):
    """A hop for every block, with caches of the positions seen so far."""

    async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
        """Run new positions through all blocks and decide the bytes after the last ``decide`` of them.

        ``tokens`` are the bytes at ``position`` and after it; ``masked`` more positions follow, whose bytes
        are unknown. A position below what was seen before takes the caches back to it; one above is an error.
        Sweeps may be started before earlier ones are done; they are computed in the order of their start.
        Raises :class:`ChainLost`.
        """
        ...

    def write(self, position: int, tokens: bytes, count: int, drafts: int = 0) -> AsyncIterator[Sweep]:
        """``count`` bytes after ``tokens``, by drafts of block 0 that the chain judges, as they are decided.

        The same bytes as one sweep a byte would decide. ``drafts``: most of them ahead, 0 leaves it to the
        chain. Nothing else may be under way meanwhile. Raises :class:`ChainLost`; what came before stays
        valid.
        """
        ...

    async def close(self) -> None:
        """Free the session at every hop. Never raises."""
        ...
