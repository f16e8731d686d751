"""The mean update, summed in memory that does not grow with the number of workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    Vector,
    chunk_hash,
    decode_vector,
    digest_of_hashes,
    encoded_size,
    parts,
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
    or a block: what it cuts is kept until the next one comes.
    """

    def __init__(self, dtype: str, size: int | None = None) -> None:
        self._dtype = dtype
        self._expected = size
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
        """Raise :class:`WireError` (malformed) unless the payload is cut as wire.tensors.chunks cuts it."""
        room = CHUNK_BYTES if self._expected is None else min(CHUNK_BYTES, self._expected - self._size)
        if len(chunk) > room or (self._expected is not None and len(chunk) < room):
            raise WireError(
                ErrorCode.MALFORMED, f"chunk {self.count} of {len(chunk)} bytes, expected {room} at most"
            )
        self._hashes.append(chunk_hash(chunk))
        self._size += len(chunk)
        self._cut += chunk
        whole = len(self._cut) - len(self._cut) % unit_bytes(self._dtype)
        self._square += _square(self._cut[:whole], self._dtype)
        del self._cut[:whole]

    def facts(self) -> PayloadFacts:
        """Raise :class:`WireError` (malformed) if the payload ends in the middle of an element."""
        square = self._square + _square(self._cut, self._dtype)
        finite = isfinite(square)
        return PayloadFacts(
            self._size, digest_of_hashes(self._hashes), sqrt(square) if finite else inf, finite
        )


def _square(data: bytearray, dtype: str) -> float:
    """Squared norm. Float32 squared cannot overflow float64: it is finite exactly if all values are."""
    values = decode_vector(data, dtype).astype(np.float64)
    return float(values @ values)


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

    Holds one float32 sum, and one encoded update while it is added, however many there are.
    """

    def __init__(self, elements: int) -> None:
        self._sum: Vector = np.zeros(elements, dtype=np.float32)
        self._weight = 0.0

    def add(
        self, chunks: Iterable[bytes | memoryview], dtype: str, weight: float, scale: float = 1.0
    ) -> None:
        """Add ``weight · scale · update``. All or nothing: an update that breaks off leaves no trace.

        Raises :class:`ValueError` for a weight that is not positive or a payload of another length.
        """
        check_weight(weight, scale)
        size = encoded_size(len(self._sum), dtype)
        payload = bytearray()
        for chunk in chunks:
            if len(payload) + len(chunk) > size:
                raise ValueError(f"update of more than {size} bytes")
            payload += chunk
        if len(payload) != size:
            raise ValueError(f"update of {len(payload)} bytes, expected {size}")
        for part in parts(len(self._sum)):
            encoded = payload[encoded_size(part.start, dtype) : encoded_size(part.stop, dtype)]
            self._sum[part] += np.float32(weight * scale) * decode_vector(encoded, dtype)
        self._weight += weight

    def mean(self) -> Vector:
        """Σ w·s·u / Σ w. Raises :class:`ValueError` when nothing was added."""
        if not self._weight:
            raise ValueError("the mean of no updates")
        mean: Vector = self._sum / np.float32(self._weight)
        return mean


def next_version(base: Vector, mean_update: Vector) -> Vector:
    """Outer step ``average``: the mean update is added to the version it was trained from."""
    version: Vector = (base + mean_update).astype(np.float32)
    return version
