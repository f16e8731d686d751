"""What a layer keeps of the positions it has seen, so that a further position costs one position."""

from __future__ import annotations

from torch import Tensor

SMALLEST_ROOM = 64


class PositionCache:
    """Tensors [..., length, features] that grow by positions together.

    Attention keeps keys and values, the MLP over positions what its kernels read.
    """

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []
        self.length = 0

    def append(self, *new: Tensor) -> list[Tensor]:
        """All positions including the new ones. Room doubles, so appending is cheap on average.

        A text appends equally many tensors, of the same shape but for the positions, every time.
        """
        end = self.length + new[0].shape[-2]
        if not self._rooms or end > self._rooms[0].shape[-2]:
            self._grow(max(SMALLEST_ROOM, 1 << (end - 1).bit_length()), new)
        for room, tensor in zip(self._rooms, new, strict=True):
            room[..., self.length : end, :] = tensor
        self.length = end
        return [room[..., :end, :] for room in self._rooms]

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        self.length = min(self.length, length)

    def _grow(self, room: int, like: tuple[Tensor, ...]) -> None:
        grown = [tensor.new_empty(*tensor.shape[:-2], room, tensor.shape[-1]) for tensor in like]
        for old, tensor in zip(self._rooms, grown, strict=False):  # no room yet before the first positions
            tensor[..., : self.length, :] = old[..., : self.length, :]
        self._rooms = grown
