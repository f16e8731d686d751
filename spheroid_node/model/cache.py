"""What a layer keeps of the positions it has seen, so that a further position costs one position.

A position reads at most ``window − 1`` positions before it. So a cache keeps these and :data:`SLACK` more,
which is how far a text may be taken back, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

SMALLEST_ROOM = 64
SLACK = 256
"""Positions that a text can be taken back by, at least."""


class PositionCache:
    """Tensors [..., length, features] that grow by positions together.

    Attention keeps keys and values, the MLP over positions what its kernels read.
    """

    def __init__(self, window: int) -> None:
        self._rooms: list[Tensor] = []
        self._keep = window - 1 + SLACK
        self.length = 0
        """Positions of the text."""
        self.first = 0
        """The oldest position that is still held."""

    def append(self, *new: Tensor) -> list[Tensor]:
        """All positions held including the new ones. Amortised, a position is copied twice at most.

        A text appends equally many tensors, of the same shape but for the positions, every time.
        """
        count = new[0].shape[-2]
        held = self.length - self.first
        if not self._rooms or held + count > self._rooms[0].shape[-2]:
            self._make_room(count, new)
            held = self.length - self.first
        for room, tensor in zip(self._rooms, new, strict=True):
            room[..., held : held + count, :] = tensor
        self.length += count
        return [room[..., : held + count, :] for room in self._rooms]

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on. Raises :class:`ValueError` where too many are gone."""
        if length < self.oldest:
            raise ValueError(f"a text of {self.length} positions cannot be taken back to {length}")
        self.length = min(self.length, length)

    @property
    def oldest(self) -> int:
        """The shortest length that the text can be taken back to."""
        return 0 if self.first == 0 else self.first + self._keep - SLACK

    @property
    def bytes(self) -> int:
        """Memory taken now."""
        return sum(room.numel() * room.element_size() for room in self._rooms)

    def _make_room(self, count: int, like: tuple[Tensor, ...]) -> None:
        """Room for ``count`` more and then some; what no later position can need is dropped."""
        keep = min(self.length - self.first, self._keep)
        size = max(SMALLEST_ROOM, 1 << (keep + keep // 4 + count - 1).bit_length())
        grown = [tensor.new_empty(*tensor.shape[:-2], size, tensor.shape[-1]) for tensor in like]
        start = self.length - self.first - keep
        for old, tensor in zip(self._rooms, grown, strict=False):  # no room yet before the first positions
            tensor[..., :keep, :] = old[..., start : start + keep, :]
        self._rooms, self.first = grown, self.length - keep


class BlockCache:
    """What all layers of a block keep of one text."""

    def __init__(self, layers: int, window: int) -> None:
        self.layers = [PositionCache(window) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Positions of the text."""
        return self.layers[0].length

    @property
    def oldest(self) -> int:
        """The shortest length that the text can be taken back to."""
        return self.layers[0].oldest

    @property
    def bytes(self) -> int:
        """Memory taken now."""
        return sum(layer.bytes for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on. Raises :class:`ValueError` where too many are gone."""
        for layer in self.layers:
            layer.truncate(length)


@dataclass(frozen=True)
class Segment:
    """The new positions of one text among those of several that are computed together."""

    cache: BlockCache
    start: int
    """Place of its first new position along the packed axis."""
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


def segments(caches: Sequence[BlockCache], counts: Sequence[int]) -> list[Segment]:
    """New positions of several texts one after the other along one axis: [B, Σ counts, ·]."""
    found, start = [], 0
    for cache, count in zip(caches, counts, strict=True):
        found.append(Segment(cache, start, count))
        start += count
    return found
