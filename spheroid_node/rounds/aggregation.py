"""The mean update, summed in memory that does not grow with the number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.tensors import (
    BLOCK_ELEMENTS,
    CHUNK_BYTES,
    Vector,
    chunk_hash,
    decode_vector,
    digest_of_hashes,
    encoded_size,
    unit_bytes,
)


@dataclass(frozen=True)
class PayloadFacts:
    """What the bytes of an update turned out to be; ``norm`` is their L2 norm, infinite unless ``finite``."""

    size: int
    digest: bytes
    norm: float
    finite: bool
    worse_by: float | None = None
    """What it adds to the from-noise cross-entropy on held-out text, nats a byte; None: not tried out."""


class PayloadMeter:
    """Takes the measure of a payload while its chunks arrive, so that it is read once.

    ``size`` is the payload's length in bytes; None takes what comes. A chunk may end anywhere in an element
    or a block: what it cuts is kept until the next one comes. ``proven`` are the hashes that the chunks must
    have, where they are known.
    """

    def __init__(self, dtype: str, size: int | None = None, proven: Sequence[bytes] = ()) -> None:
        self._dtype = dtype
        self._expected = size
        self._proven = proven
        self._size = 0
        self._hashes: list[bytes] = []
        self._cut = bytearray()
        self._square = 0.0

    @property
    def complete(self) -> bool:
        return self._size == self._expected

    @property
    def count(self) -> int:
        """Chunks so far: the index that the next one must have."""
        return len(self._hashes)

    def feed(self, chunk: bytes | memoryview) -> None:
        """Raise :class:`WireError` (malformed) unless the payload is cut as wire.tensors.chunks cuts it.

        And (not-authentic) for a chunk of another hash, which leaves no trace.
        """
        room = CHUNK_BYTES if self._expected is None else min(CHUNK_BYTES, self._expected - self._size)
        if len(chunk) > room or (self._expected is not None and len(chunk) < room):
            raise WireError(
                ErrorCode.MALFORMED, f"chunk {self.count} of {len(chunk)} bytes, expected {room} at most"
            )
        found = chunk_hash(chunk)
        if self._proven and found != self._proven[self.count]:
            raise WireError(ErrorCode.NOT_AUTHENTIC, f"chunk {self.count} does not match its hash")
        self._hashes.append(found)
        self._size += len(chunk)
        unit = unit_bytes(self._dtype)
        # What the chunk before has cut, then all that is whole in this one, then what it cuts itself.
        begin = -len(self._cut) % unit
        end = max(begin, len(chunk) - (len(chunk) - begin) % unit)
        self._cut += chunk[:begin]
        if len(self._cut) == unit:
            self._square += _square(self._cut, self._dtype)
            self._cut = bytearray()
        self._square += _square(memoryview(chunk)[begin:end], self._dtype)
        self._cut += chunk[end:]

    def facts(self) -> PayloadFacts:
        """Raise :class:`WireError` (malformed) if the payload ends in the middle of an element."""
        square = self._square + _square(self._cut, self._dtype)
        finite = isfinite(square)
        return PayloadFacts(
            self._size, digest_of_hashes(self._hashes), sqrt(square) if finite else inf, finite
        )


def _square(data: bytearray | memoryview, dtype: str) -> float:
    """Squared norm. Float32 squared cannot overflow float64: it is finite exactly if all values are."""
    square, step = 0.0, encoded_size(BLOCK_ELEMENTS, dtype)
    for start in range(0, len(data), step):
        with np.errstate(invalid="ignore"):  # a NaN is for the caller to see
            values = decode_vector(data[start : start + step], dtype).astype(np.float64)
            square += float(values @ values)
    return square


def payload_facts(chunks: Iterable[bytes | memoryview], dtype: str) -> PayloadFacts:
    """Facts of a payload of any size, in one pass. Raises :class:`WireError` like the meter."""
    meter = PayloadMeter(dtype)
    for chunk in chunks:
        meter.feed(chunk)
    return meter.facts()


def check_weight(weight: float, scale: float) -> None:
    """Raise :class:`ValueError` for what no update may count."""
    if not (weight > 0 and isfinite(weight) and isfinite(scale)):
        raise ValueError(f"weight {weight} and scale {scale} of an update must be positive and finite")


class Accumulator:
    """Weighted mean of updates of ``elements`` values, added one at a time.

    Holds one float32 sum, and room for one encoded update, however many there are.
    """

    def __init__(self, elements: int) -> None:
        self._sum: Vector = np.zeros(elements, dtype=np.float32)
        self._weight = 0.0
        self._payload = bytearray()

    def add(
        self, chunks: Iterable[bytes | memoryview], dtype: str, weight: float, scale: float = 1.0
    ) -> None:
        """Add ``weight · scale · update``. All or nothing: an update that breaks off leaves no trace.

        Raises :class:`ValueError` for a weight that is not positive or a payload of another length.
        """
        check_weight(weight, scale)
        payload = self._gather(chunks, encoded_size(len(self._sum), dtype))
        factor, step = np.float32(weight * scale), encoded_size(BLOCK_ELEMENTS, dtype)
        for start, at in zip(
            range(0, len(self._sum), BLOCK_ELEMENTS), range(0, len(payload), step), strict=True
        ):
            values = decode_vector(payload[at : at + step], dtype)
            self._sum[start : start + BLOCK_ELEMENTS] += factor * values
        self._weight += weight

    def _gather(self, chunks: Iterable[bytes | memoryview], size: int) -> memoryview:
        """The whole update, in the room that the one before it had. Raises :class:`ValueError`."""
        if len(self._payload) != size:
            self._payload = bytearray(size)
        room, at = memoryview(self._payload), 0
        for chunk in chunks:
            if at + len(chunk) > size:
                raise ValueError(f"update of more than {size} bytes")
            room[at : at + len(chunk)] = chunk
            at += len(chunk)
        if at != size:
            raise ValueError(f"update of {at} bytes, expected {size}")
        return room

    def mean(self) -> Vector:
        """Σ w·s·u / Σ w; the updates are forgotten. Raises :class:`ValueError` when nothing was added."""
        if not self._weight:
            raise ValueError("the mean of no updates")
        mean, self._sum, self._payload = self._sum, np.zeros(0, dtype=np.float32), bytearray()
        mean /= np.float32(self._weight)
        self._weight = 0.0
        return mean
