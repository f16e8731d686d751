"""Updates combined when all of a round are there, so that a few hostile ones have little say.

The coordinate-wise trimmed mean and median (Yin et al. 2018, arXiv 1803.01498). Every update counts the same,
whatever its tokens: a weight that an update brings itself is a say that it could take. And the clipped mean
of a round before which nobody knows how long an update is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import IO

import numpy as np
from numpy.typing import NDArray

from spheroid_node.rounds.aggregation import Accumulator, check_weight, payload_facts
from spheroid_node.wire.tensors import (
    BLOCK_ELEMENTS,
    CHUNK_BYTES,
    Vector,
    decode_vector,
    encoded_size,
    parts,
)

Keep = Callable[[], IO[bytes]]
"""Opens an empty place for the bytes of an update; closing it forgets them."""


class Sorter:
    """Keeps all updates of a round, as they came, and combines them a part at a time.

    Memory is that of one part of every update, however large they are, and of the result.
    ``trim`` is the share of values left out at either end; one half leaves the median.
    """

    def __init__(self, elements: int, trim: float, keep: Keep) -> None:
        if not 0 <= trim <= 0.5:
            raise ValueError(f"a share of {trim} cannot be left out at either end")
        self._elements, self._trim, self._keep = elements, trim, keep
        self._kept: list[tuple[IO[bytes], str, float]] = []

    def add(
        self, chunks: Iterable[bytes | memoryview], dtype: str, weight: float, scale: float = 1.0
    ) -> None:
        """Keep ``scale · update``; ``weight`` only has to be one. All or nothing.

        Raises :class:`ValueError` for a weight that is not positive or a payload of another length.
        """
        check_weight(weight, scale)
        place = _put_by(chunks, encoded_size(self._elements, dtype), self._keep)
        self._kept.append((place, dtype, scale))

    def mean(self) -> Vector:
        """What is left between the trimmed ends, averaged; the updates are forgotten.

        Raises :class:`ValueError` when nothing was added.
        """
        if not self._kept:
            raise ValueError("the mean of no updates")
        combined: Vector = np.empty(self._elements, dtype=np.float32)
        for part in parts(self._elements, BLOCK_ELEMENTS):
            values_EN = np.empty((part.stop - part.start, len(self._kept)), dtype=np.float32)
            for number, kept in enumerate(self._kept):
                values_EN[:, number] = self._read(*kept, part)
            combined[part] = self._middle(values_EN)
        for place, _, _ in self._kept:
            place.close()
        self._kept.clear()
        return combined

    def _read(self, place: IO[bytes], dtype: str, scale: float, part: slice) -> Vector:
        start, end = encoded_size(part.start, dtype), encoded_size(part.stop, dtype)
        place.seek(start)
        return np.float32(scale) * decode_vector(place.read(end - start), dtype)

    def _middle(self, values_EN: NDArray[np.float32]) -> Vector:
        count = values_EN.shape[1]
        # Of an odd number the median is one value, of an even number the mean of two.
        cut = min(int(self._trim * count), (count - 1) // 2)
        values_EN.sort(axis=1)  # what lies side by side is sorted in half the time
        middle: Vector = values_EN[:, cut : count - cut].mean(axis=1, dtype=np.float32)
        return middle


class LateClipper:
    """The weighted mean of updates that are clipped to a multiple of their own median norm.

    They are kept until then: the first one to come would else have no limit. Memory is that of one update.
    """

    def __init__(self, elements: int, factor: float, keep: Keep) -> None:
        self._elements, self._factor, self._keep = elements, factor, keep
        self._kept: list[tuple[IO[bytes], str, float, float]] = []

    def add(
        self, chunks: Iterable[bytes | memoryview], dtype: str, weight: float, scale: float = 1.0
    ) -> None:
        """Keep an update; its scale is found in the end, whatever ``scale`` is. All or nothing.

        Raises :class:`ValueError` for a weight that is not positive or a payload of another length.
        """
        check_weight(weight, scale)
        place = _put_by(chunks, encoded_size(self._elements, dtype), self._keep)
        self._kept.append((place, dtype, weight, payload_facts(_read(place), dtype).norm))

    def mean(self) -> Vector:
        """Σ w·s·u / Σ w with s = min(1, factor · median norm / norm); the updates are forgotten.

        Raises :class:`ValueError` when nothing was added.
        """
        limit = self._factor * median([norm for *_, norm in self._kept if norm > 0] or [0.0])
        accumulator = Accumulator(self._elements)
        for place, dtype, weight, norm in self._kept:
            accumulator.add(_read(place), dtype, weight, min(1.0, limit / norm) if norm > 0 else 1.0)
            place.close()
        self._kept.clear()
        return accumulator.mean()


def _put_by(chunks: Iterable[bytes | memoryview], size: int, keep: Keep) -> IO[bytes]:
    """Raises :class:`ValueError` for a payload of another length, and then nothing is kept."""
    place = keep()
    try:
        written = sum(place.write(chunk) for chunk in chunks)
        if written != size:
            raise ValueError(f"update of {written} bytes, expected {size}")
    except BaseException:
        place.close()
        raise
    return place


def _read(place: IO[bytes]) -> Iterator[bytes]:
    place.seek(0)
    while chunk := place.read(CHUNK_BYTES):
        yield chunk
