"""Tensors on the wire, and the chunks and digests of parameter vectors."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    FP16_MAX,
    chunk_count,
    chunk_hash,
    chunks,
    decode_vector,
    digest_of_hashes,
    encode_vector,
    encoded_size,
    pack_tensor,
    payload_digest,
    unpack_tensor,
    vector_digest,
)

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
floats32 = st.floats(width=32, allow_nan=False)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(shapes, st.integers(0, 2**32 - 1))
def test_tensors_come_back(shape: tuple[int, ...], seed: int) -> None:
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    again = unpack_tensor(unpack(pack(pack_tensor(array))), shape)
    assert again.dtype == np.float32
    np.testing.assert_array_equal(again, array)


def test_half_precision_comes_back_as_float32() -> None:
    array = np.array([[1.0, -2.5, 0.125]], dtype=np.float32)
    fields = pack_tensor(array, "fp16")
    assert len(fields["data"]) == 6
    np.testing.assert_array_equal(unpack_tensor(fields, (None, 3)), array)


def test_bytes_are_little_endian_and_rows_come_first() -> None:
    array = np.asfortranarray([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)
    assert pack_tensor(array)["data"] == bytes.fromhex("0000803f 00000040 00004040 00008040")
    assert encode_vector(np.array([1.0], dtype=np.float32), "fp16") == bytes.fromhex("003c")


GOOD: dict[str, Any] = {"dtype": "float32", "shape": [2, 3], "data": bytes(24)}
DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        "float32",
        {},
        GOOD | {"dtype": "float64"},
        GOOD | {"dtype": ["float32"]},
        GOOD | {"dtype": None},
        GOOD | {"shape": [3, 2]},
        GOOD | {"shape": [6]},
        GOOD | {"shape": [2, 3, 1]},
        GOOD | {"shape": [2, 3.0]},
        GOOD | {"shape": [True, 3], "data": bytes(12)},
        GOOD | {"shape": [-2, -3]},
        GOOD | {"shape": [0, 3], "data": b""},
        GOOD | {"shape": DEEP},
        GOOD | {"shape": "23"},
        GOOD | {"data": bytes(23)},
        GOOD | {"data": bytes(28)},
        GOOD | {"data": "x" * 24},
        {"dtype": "float32", "shape": [2**62, 3], "data": bytes(24)},
    ],
    ids=lambda fields: str(fields)[:40] if fields is None or len(str(fields)) < 200 else "deep",
)
def test_a_tensor_that_disagrees_with_itself_or_with_us_is_malformed(fields: Any) -> None:
    with pytest.raises(WireError) as caught:
        unpack_tensor(fields, (None, 3))
    assert caught.value.code is ErrorCode.MALFORMED


@given(
    st.fixed_dictionaries(
        {}, optional={"dtype": st.just("fp16") | anything, "shape": anything, "data": anything}
    ),
    st.lists(st.none() | st.integers(0, 5), max_size=5).map(tuple),
)
def test_any_fields_give_an_array_or_a_wire_error(fields: Any, shape: tuple[int | None, ...]) -> None:
    try:
        unpack_tensor(fields, shape)
    except WireError as error:
        assert error.code is ErrorCode.MALFORMED


@given(st.lists(floats32, max_size=50), st.sampled_from(["float32", "fp16"]))
def test_vectors_come_back(values: list[float], dtype: str) -> None:
    vector = np.array(values, dtype=np.float32)
    data = encode_vector(vector, dtype)
    assert len(data) == encoded_size(len(values), dtype)
    again = decode_vector(data, dtype)
    assert again.dtype == np.float32
    if dtype == "float32":
        np.testing.assert_array_equal(again, vector)
    else:
        clamped = np.clip(vector, -FP16_MAX, FP16_MAX)
        np.testing.assert_allclose(again, clamped, rtol=2**-11, atol=2**-25)


def test_fp16_clamps_and_keeps_nan_visible() -> None:
    vector = np.array([1e30, -np.inf, np.nan], dtype=np.float32)
    again = decode_vector(encode_vector(vector, "fp16"), "fp16")
    np.testing.assert_array_equal(again, np.array([FP16_MAX, -FP16_MAX, np.nan], dtype=np.float32))


@pytest.mark.parametrize(("dtype", "size"), [("fp16", 3), ("float32", 6)])
def test_a_cut_element_is_malformed(dtype: str, size: int) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_vector(bytes(size), dtype)


@pytest.mark.parametrize(
    ("size", "count"), [(0, 1), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (3 * CHUNK_BYTES, 3)]
)
def test_chunks_cover_the_payload(size: int, count: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    parts = list(chunks(data))
    assert len(parts) == chunk_count(size) == count
    assert b"".join(parts) == data
    assert all(len(part) <= CHUNK_BYTES for part in parts)


def test_the_digest_is_a_hash_of_chunk_hashes() -> None:
    data = np.random.default_rng(7).bytes(CHUNK_BYTES + 5)
    leaves = [
        hashlib.blake2b(part, digest_size=32).digest() for part in (data[:CHUNK_BYTES], data[CHUNK_BYTES:])
    ]
    expected = hashlib.blake2b(leaves[0] + leaves[1], digest_size=32).digest()
    assert payload_digest(data) == digest_of_hashes(map(chunk_hash, chunks(data))) == expected
    assert payload_digest(data[:-1]) != expected


def test_the_digest_of_a_vector_sees_one_changed_bit() -> None:
    vector = np.arange(10, dtype=np.float32)
    changed = vector.copy()
    changed[3] = np.nextafter(changed[3], np.float32(9))
    assert vector_digest(vector) == payload_digest(vector.astype("<f4").tobytes())
    assert vector_digest(changed) != vector_digest(vector)
