"""Arrays on the wire, and the chunks and digests of parameter vectors.

Little-endian throughout. Every dtype, shape and length is checked before an array is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from spheroid_node.wire.codes import ErrorCode, WireError

Vector = NDArray[np.float32]
"""The parameters of a group, flattened: shape (elements,), float32."""

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "fp16": np.dtype("<f2")}
"""Of tensors. A parameter vector may also be ``int8``, in blocks."""

INT8_ELEMENTS = 4096
INT8_BLOCK = np.dtype([("scale", "<f4"), ("values", "i1", INT8_ELEMENTS)])
"""Elements that share a scale: element i is values[i] · scale. The last block of a vector may be short."""

SCALE_BYTES = 4
MAX_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
"""The largest scale whose 127-fold is finite."""

MIN_SCALE = np.finfo(np.float32).tiny
"""2⁻¹²⁶: below it float32 is subnormal, and a scale would be off by more than its rounding."""

PART_ELEMENTS = 64 * INT8_ELEMENTS
BLOCK_ELEMENTS = 16 * INT8_ELEMENTS
"""Elements that are worked on at a time where a few copies of them are to stay in the cache."""

CHUNK_BYTES = 1024 * 1024
DIGEST_BYTES = 32
MAX_DIMENSIONS = 4
FP16_MAX = 65504.0


def pack_tensor(array: NDArray[Any], dtype: str = "float32") -> dict[str, Any]:
    """An array as a map of dtype, shape and bytes.

    ``fp16`` clamps at ±65504. ``int8`` takes an array of rows, each with its largest value over 127 as the
    scale of its integers; a row is off by half a scale at most.
    """
    return {"dtype": dtype, "shape": list(array.shape), "data": _tensor_bytes(array, dtype)}


def _tensor_bytes(array: NDArray[Any], dtype: str) -> bytes:
    if dtype == "int8":
        rows = np.empty(array.shape[0], _int8_row(array.shape[1]))
        largest = np.abs(array).max(axis=1)
        rows["scale"] = np.maximum(largest / 127, MIN_SCALE)
        rows["values"] = np.rint(array / rows["scale"][:, None])
        return rows.tobytes()
    if dtype == "fp16":
        array = np.minimum(np.maximum(array, -FP16_MAX), FP16_MAX)  # np.clip takes three times as long
    return array.astype(DTYPES[dtype]).tobytes()


def _int8_row(width: int) -> np.dtype[Any]:
    return np.dtype([("scale", "<f4"), ("values", "i1", (width,))])


def unpack_tensor(fields: Any, shape: tuple[int | None, ...]) -> Vector:
    """The float32 array in ``fields``; ``None`` in ``shape`` allows any length of that axis.

    The array may be read-only. Raises :class:`WireError` (malformed) unless dtype, shape and bytes agree
    with each other and with ``shape``, and no axis is empty.
    """
    try:
        name, sent, data = fields["dtype"], fields["shape"], fields["data"]
        known = name == "int8" or name in DTYPES
    except (KeyError, TypeError) as error:
        raise WireError(ErrorCode.MALFORMED, "tensor without a known dtype, shape and data") from error
    if not known or not (
        isinstance(sent, list)
        and isinstance(data, bytes)
        and len(sent) == len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and size > 0 for size in sent)
        and all(want is None or want == size for want, size in zip(shape, sent, strict=True))
        and _tensor_size(name, sent) == len(data)
    ):
        raise WireError(ErrorCode.MALFORMED, f"dtype, shape and bytes of a tensor, expected shape {shape!r}")
    if name == "int8":
        rows = np.frombuffer(data, dtype=_int8_row(sent[1]))
        return np.asarray(rows["values"].astype(np.float32) * rows["scale"][:, None], dtype=np.float32)
    return np.asarray(np.frombuffer(data, dtype=DTYPES[name]).reshape(sent), dtype=np.float32)


def _tensor_size(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor; −1 for what is none."""
    if dtype == "int8":
        return shape[0] * (SCALE_BYTES + shape[1]) if len(shape) == 2 else -1
    return prod(shape) * DTYPES[dtype].itemsize


def parts(elements: int, size: int = PART_ELEMENTS) -> Iterator[slice]:
    """A vector in parts that are encoded and decoded on their own, so that large ones need little memory.

    ``size``: elements of a part, a multiple of INT8_ELEMENTS.
    """
    for start in range(0, elements, size):
        yield slice(start, min(start + size, elements))


def encode_vector(vector: Vector, dtype: str) -> bytes:
    """A parameter vector as bytes.

    ``fp16`` halves the size and clamps at ±65504. ``int8`` takes a quarter: in blocks of 4096 elements, a
    scale of max |x| / 127 and the nearest multiples of it, so no element is off by more than half a scale.
    A block whose scale would be below 2⁻¹²⁶ becomes zeros; one with a NaN becomes NaN.
    """
    if dtype == "int8":
        return b"".join(_to_int8(vector[part]) for part in parts(len(vector)))
    if dtype == "fp16":
        vector = np.clip(vector, -FP16_MAX, FP16_MAX)
    return vector.astype(DTYPES[dtype]).tobytes()


def decode_vector(data: bytes | bytearray | memoryview, dtype: str) -> Vector:
    """Inverse of :func:`encode_vector`, for a whole vector or for consecutive units of one.

    An ``int8`` block with a negative scale means nothing and becomes NaN. Raises :class:`WireError`
    (malformed) when an element is cut, or a block has no values.
    """
    if dtype == "int8":
        return _from_int8(data)
    if len(data) % DTYPES[dtype].itemsize:
        raise WireError(ErrorCode.MALFORMED, f"{len(data)} bytes are no whole number of {dtype} elements")
    values = np.frombuffer(data, dtype=DTYPES[dtype])
    return _from_fp16(values) if dtype == "fp16" else np.asarray(values, dtype=np.float32)


def _from_fp16(halves: NDArray[np.float16]) -> Vector:
    """By torch, which takes a sixth of numpy's time, a piece that stays in the cache at a time."""
    import torch  # here, as most who import this decode nothing

    vector: Vector = np.empty(len(halves), dtype=np.float32)
    for start in range(0, len(halves), BLOCK_ELEMENTS):
        piece = slice(start, start + BLOCK_ELEMENTS)
        # A copy, as torch takes no array that may not be written to.
        torch.from_numpy(vector[piece]).copy_(torch.from_numpy(halves[piece].astype(np.float16)))
    return vector


def unit_bytes(dtype: str) -> int:
    """Bytes of an element, or of a block: what of an encoded vector can be decoded on its own."""
    return INT8_BLOCK.itemsize if dtype == "int8" else DTYPES[dtype].itemsize


def encoded_size(elements: int, dtype: str) -> int:
    """Bytes of an encoded vector of ``elements``."""
    if dtype == "int8":
        return elements + _int8_blocks(elements) * SCALE_BYTES
    return elements * DTYPES[dtype].itemsize


def _int8_blocks(elements: int) -> int:
    return -(-elements // INT8_ELEMENTS)


def _to_int8(vector: Vector) -> bytes:
    blocks = np.empty(_int8_blocks(len(vector)), dtype=INT8_BLOCK)
    padded = np.zeros((len(blocks), INT8_ELEMENTS), dtype=np.float32)
    padded.reshape(-1)[: len(vector)] = vector
    scale = np.minimum(np.abs(padded).max(axis=1) / np.float32(127), MAX_SCALE)
    scale[scale < MIN_SCALE] = 0
    divisor = np.where(scale > 0, scale, np.inf)[:, None]
    with np.errstate(invalid="ignore"):
        multiples = np.rint(padded / divisor)
    blocks["scale"] = scale
    blocks["values"] = np.nan_to_num(multiples, copy=False, nan=0.0, posinf=127.0, neginf=-127.0)
    return blocks.tobytes()[: encoded_size(len(vector), "int8")]


def _from_int8(data: bytes | bytearray | memoryview) -> Vector:
    cut = len(data) % INT8_BLOCK.itemsize
    if 0 < cut <= SCALE_BYTES:
        raise WireError(ErrorCode.MALFORMED, f"{len(data)} bytes of int8 end in a block without values")
    whole = bytes(data) + bytes(INT8_BLOCK.itemsize - cut) if cut else data
    blocks = np.frombuffer(whole, dtype=INT8_BLOCK)
    scale = np.where(blocks["scale"] >= 0, blocks["scale"], np.float32(np.nan))
    vector = blocks["values"].astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        vector *= scale[:, None]
    return vector.reshape(-1)[: len(data) - len(blocks) * SCALE_BYTES]


def chunk_count(size: int) -> int:
    """Chunks that ``size`` bytes are cut into; the last may be short, and there is at least one."""
    return max(1, -(-size // CHUNK_BYTES))


def chunks(data: bytes | memoryview) -> Iterator[memoryview]:
    """``data`` in chunks of CHUNK_BYTES."""
    view = memoryview(data)
    for index in range(chunk_count(len(view))):
        yield view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """BLAKE3 of one chunk: seven times as fast as BLAKE2b, so that a check costs next to nothing."""
    return blake3(chunk).digest()


def chunk_hashes(data: bytes | memoryview) -> bytes:
    """The hashes of all chunks of a payload, one after the other."""
    return b"".join(map(chunk_hash, chunks(data)))


def split_hashes(hashes: bytes) -> list[bytes]:
    """The hashes of a listing, which come one after the other."""
    return [hashes[at : at + DIGEST_BYTES] for at in range(0, len(hashes), DIGEST_BYTES)]


def digest_of_hashes(hashes: Iterable[bytes]) -> bytes:
    """Digest of a payload from the hashes of its chunks: BLAKE3 of their concatenation.

    So a list of chunk hashes proves itself against a signed digest before the first chunk is asked for.
    """
    return blake3(b"".join(hashes)).digest()


def payload_digest(data: bytes | memoryview) -> bytes:
    """Digest of a whole payload."""
    return digest_of_hashes(chunk_hash(chunk) for chunk in chunks(data))


def vector_bytes(vector: Vector) -> memoryview:
    """The float32 encoding of a vector, without a copy of it."""
    return np.ascontiguousarray(vector, dtype=DTYPES["float32"]).view(np.uint8).data


def vector_digest(vector: Vector) -> bytes:
    """Parameter digest of a group: the payload digest of its float32 encoding."""
    return payload_digest(vector_bytes(vector))
