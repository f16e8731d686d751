"""Arrays on the wire, and the chunks and digests of parameter vectors.

Little-endian throughout. Every dtype, shape and length is checked before an array is made of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spheroid_node.wire.codes import ErrorCode, WireError

Vector = NDArray[np.float32]
"""The parameters of a group, flattened: shape (elements,), float32."""

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "fp16": np.dtype("<f2")}
CHUNK_BYTES = 1024 * 1024
DIGEST_BYTES = 32
MAX_DIMENSIONS = 4
FP16_MAX = 65504.0


def pack_tensor(array: NDArray[Any], dtype: str = "float32") -> dict[str, Any]:
    """An array as a map of dtype, shape and bytes."""
    return {
        "dtype": dtype,
        "shape": list(array.shape),
        "data": np.ascontiguousarray(array, dtype=DTYPES[dtype]).tobytes(),
    }


def unpack_tensor(fields: Any, shape: tuple[int | None, ...]) -> Vector:
    """The float32 array in ``fields``; ``None`` in ``shape`` allows any length of that axis.

    The array may be read-only. Raises :class:`WireError` (malformed) unless dtype, shape and bytes agree
    with each other and with ``shape``, and no axis is empty.
    """
    try:
        dtype, sent, data = DTYPES[fields["dtype"]], fields["shape"], fields["data"]
    except (KeyError, TypeError) as error:
        raise WireError(ErrorCode.MALFORMED, "tensor without a known dtype, shape and data") from error
    if not (
        isinstance(sent, list)
        and isinstance(data, bytes)
        and len(sent) == len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and size > 0 for size in sent)
        and all(want is None or want == size for want, size in zip(shape, sent, strict=True))
        and prod(sent) * dtype.itemsize == len(data)
    ):
        raise WireError(ErrorCode.MALFORMED, f"shape and bytes of a tensor, expected shape {shape!r}")
    return np.asarray(np.frombuffer(data, dtype=dtype).reshape(sent), dtype=np.float32)


def encode_vector(vector: Vector, dtype: str) -> bytes:
    """A parameter vector as bytes. ``fp16`` halves the size and clamps at ±65504."""
    if dtype == "fp16":
        vector = np.clip(vector, -FP16_MAX, FP16_MAX)
    return vector.astype(DTYPES[dtype]).tobytes()


def decode_vector(data: bytes | memoryview, dtype: str) -> Vector:
    """Inverse of :func:`encode_vector`, for a whole vector or a chunk of whole elements.

    Raises :class:`WireError` (malformed) when an element is cut.
    """
    if len(data) % DTYPES[dtype].itemsize:
        raise WireError(ErrorCode.MALFORMED, f"{len(data)} bytes are no whole number of {dtype} elements")
    return np.asarray(np.frombuffer(data, dtype=DTYPES[dtype]), dtype=np.float32)


def encoded_size(elements: int, dtype: str) -> int:
    """Bytes of an encoded vector of ``elements``."""
    return elements * DTYPES[dtype].itemsize


def chunk_count(size: int) -> int:
    """Chunks that ``size`` bytes are cut into; the last may be short, and there is at least one."""
    return max(1, -(-size // CHUNK_BYTES))


def chunks(data: bytes) -> Iterator[memoryview]:
    """``data`` in chunks of CHUNK_BYTES."""
    view = memoryview(data)
    for index in range(chunk_count(len(data))):
        yield view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """BLAKE2b-256 of one chunk."""
    return hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).digest()


def digest_of_hashes(hashes: Iterable[bytes]) -> bytes:
    """Digest of a payload from the hashes of its chunks: BLAKE2b-256 of their concatenation.

    So a list of chunk hashes proves itself against a signed digest before the first chunk is asked for.
    """
    return hashlib.blake2b(b"".join(hashes), digest_size=DIGEST_BYTES).digest()


def payload_digest(data: bytes) -> bytes:
    """Digest of a whole payload."""
    return digest_of_hashes(chunk_hash(chunk) for chunk in chunks(data))


def vector_digest(vector: Vector) -> bytes:
    """Parameter digest of a group: the payload digest of its float32 encoding."""
    return payload_digest(encode_vector(vector, "float32"))
