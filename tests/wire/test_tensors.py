"""Tensors on the wire, and the chunks and digests of parameter vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.run import RoundSpec
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.messages import UpdateHeader
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    FP16_MAX,
    INT8_ELEMENTS,
    MAX_SCALE,
    MIN_SCALE,
    PART_ELEMENTS,
    Vector,
    chunk_count,
    chunk_hash,
    chunks,
    decode_vector,
    digest_of_hashes,
    encode_vector,
    encoded_size,
    pack_tensor,
    parts,
    payload_digest,
    unit_bytes,
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
        GOOD | {"dtype": "int8", "data": bytes(6)},
        GOOD | {"dtype": "int8", "data": bytes(10)},
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


@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-30, 1.0, 1e30])
)
def test_int8_rows_are_off_by_half_a_scale_at_most(rows: int, width: int, seed: int, size: float) -> None:
    array = (size * np.random.default_rng(seed).standard_normal((rows, width))).astype(np.float32)
    fields = unpack(pack(pack_tensor(array, "int8")))
    assert len(fields["data"]) == rows * (4 + width)
    again = unpack_tensor(fields, (rows, width))
    scale = np.maximum(np.abs(array).max(axis=1, keepdims=True) / 127, np.finfo(np.float32).tiny)
    assert (np.abs(again.astype(np.float64) - array) <= 0.500001 * scale).all()
    with pytest.raises(WireError, match="malformed"):
        unpack_tensor(fields | {"data": fields["data"][:-1]}, (rows, width))
    with pytest.raises(WireError, match="malformed"):
        unpack_tensor(fields | {"shape": [rows * width]}, (None,))


def test_fp16_tensors_clamp() -> None:
    array = np.array([[1e9, -1e9, 0.5]])
    assert unpack_tensor(pack_tensor(array, "fp16"), (1, 3)).tolist() == [[65504, -65504, 0.5]]


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


# --- int8 -----------------------------------------------------------------------------------------


def scales(data: bytes, elements: int) -> Vector:
    """The scale of every element, read from an encoded vector."""
    each = [np.frombuffer(data, "<f4", 1, at) for at in range(0, len(data), INT8_ELEMENTS + 4)]
    return np.repeat(np.array(each, dtype=np.float32).ravel(), INT8_ELEMENTS)[:elements]


def test_int8_bytes_are_a_scale_and_multiples_of_it() -> None:
    vector = np.array([127.0, -127.0, 1.0, 0.4, -0.6, 2.5, 3.5], dtype=np.float32)
    assert encode_vector(vector, "int8") == bytes.fromhex("0000803f 7f 81 01 00 ff 02 04")
    ends = np.zeros(INT8_ELEMENTS + 2, dtype=np.float32)
    ends[[0, -1]] = [254.0, -63.5]
    first, second = bytes.fromhex("00000040 7f") + bytes(INT8_ELEMENTS - 1), bytes.fromhex("0000003f 00 81")
    assert encode_vector(ends, "int8") == first + second
    assert decode_vector(first + second, "int8").tolist() == ends.tolist()


@pytest.mark.parametrize(
    ("elements", "size"),
    [
        (0, 0),
        (1, 5),
        (INT8_ELEMENTS - 1, 4099),
        (INT8_ELEMENTS, 4100),
        (INT8_ELEMENTS + 1, 4105),
        (2 * INT8_ELEMENTS, 8200),
        (PART_ELEMENTS + 1, 64 * 4100 + 5),
    ],
)
def test_int8_is_as_exact_as_its_scales_at_any_size(elements: int, size: int) -> None:
    random = np.random.default_rng(elements)
    vector = (random.standard_normal(elements) * np.exp(random.normal(0, 5, elements))).astype(np.float32)
    data = encode_vector(vector, "int8")
    assert len(data) == encoded_size(elements, "int8") == size
    again = decode_vector(data, "int8")
    assert again.dtype == np.float32
    scale = scales(data, elements).astype(np.float64)
    # The product is rounded to float32, which is 2⁻²⁴ of up to 127 scales.
    assert np.all(np.abs(again.astype(np.float64) - vector) <= scale * (0.5 + 127 * 2**-23))
    for start in range(0, elements, INT8_ELEMENTS):
        block = slice(start, start + INT8_ELEMENTS)
        assert scale[start] == pytest.approx(np.abs(vector[block]).max() / 127)


@given(st.lists(floats32, max_size=50))
def test_int8_takes_whatever_float32_can_hold(values: list[float]) -> None:
    vector = np.array(values, dtype=np.float32)
    data = encode_vector(vector, "int8")
    again = decode_vector(data, "int8")
    assert np.isfinite(again).all()
    # Beyond half a scale is only what lies below the least scale, or above what 127 of the largest reach.
    clamped = np.clip(vector.astype(np.float64), -127 * MAX_SCALE, 127 * MAX_SCALE)
    bound = np.maximum(scales(data, len(values)).astype(np.float64) * (0.5 + 127 * 2**-23), 127 * MIN_SCALE)
    assert np.all(np.abs(again - clamped) <= bound)


@pytest.mark.parametrize("values", [[0.0, -0.0, 0.0], [1e-37, -1e-38], [1e-45]])
def test_int8_sends_zeros_and_what_is_nearly_zero_as_zero_bytes(values: list[float]) -> None:
    assert encode_vector(np.array(values, dtype=np.float32), "int8") == bytes(4 + len(values))


def test_int8_keeps_nan_visible_in_its_block_alone() -> None:
    vector = np.ones(INT8_ELEMENTS + 2, dtype=np.float32)
    vector[3] = np.nan
    again = decode_vector(encode_vector(vector, "int8"), "int8")
    assert np.isnan(again[:INT8_ELEMENTS]).all()
    assert again[INT8_ELEMENTS:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scale", [-1.0, -1e-45, -np.inf, np.inf, np.nan, 3e38])
def test_a_scale_that_means_nothing_gives_no_finite_block(scale: float) -> None:
    hostile = np.array([scale], dtype="<f4").tobytes() + bytes([100] * INT8_ELEMENTS)
    again = decode_vector(hostile + encode_vector(np.ones(2, dtype=np.float32), "int8"), "int8")
    assert not np.isfinite(again[:INT8_ELEMENTS]).any()
    assert again[INT8_ELEMENTS:].tolist() == [1.0, 1.0]


def test_int8_reads_the_value_that_no_writer_makes() -> None:
    assert decode_vector(bytes.fromhex("0000003f 80 7f"), "int8").tolist() == [-64.0, 63.5]


def test_an_int8_payload_cut_anywhere_is_shorter_or_malformed() -> None:
    vector = np.linspace(-1, 1, INT8_ELEMENTS + 3, dtype=np.float32)
    data = encode_vector(vector, "int8")
    whole = decode_vector(data, "int8")
    for cut in range(len(data)):
        if cut in (1, 2, 3, 4, 4101, 4102, 4103, 4104):
            with pytest.raises(WireError, match="malformed"):
                decode_vector(data[:cut], "int8")
            continue
        elements = cut - 4 * -(-cut // 4100)
        np.testing.assert_array_equal(decode_vector(data[:cut], "int8"), whole[:elements])


@given(st.binary(max_size=40))
def test_any_bytes_are_an_int8_vector_or_malformed(data: bytes) -> None:
    try:
        vector = decode_vector(data, "int8")
    except WireError as error:
        assert error.code is ErrorCode.MALFORMED
        assert 1 <= len(data) <= 4
    else:
        assert encoded_size(len(vector), "int8") == len(data)


@pytest.mark.parametrize("dtype", ["float32", "fp16", "int8"])
def test_parts_of_a_vector_are_encoded_and_decoded_on_their_own(dtype: str) -> None:
    vector = np.random.default_rng(3).standard_normal(2 * PART_ELEMENTS + 5).astype(np.float32)
    data = encode_vector(vector, dtype)
    cut = list(parts(len(vector)))
    assert [part.stop - part.start for part in cut] == [PART_ELEMENTS, PART_ELEMENTS, 5]
    assert b"".join(encode_vector(vector[part], dtype) for part in cut) == data
    bounds = [(encoded_size(part.start, dtype), encoded_size(part.stop, dtype)) for part in cut]
    assert all(begin % unit_bytes(dtype) == 0 for begin, _ in bounds)
    decoded = [decode_vector(data[begin:end], dtype) for begin, end in bounds]
    np.testing.assert_array_equal(np.concatenate(decoded), decode_vector(data, dtype))


VECTORS = json.loads(
    (Path(__file__).parents[2] / "protocols/vectors/payload.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("entry", VECTORS, ids=lambda entry: entry["dtype"])
def test_the_payloads_of_the_protocol(entry: dict[str, Any]) -> None:
    payload = bytes.fromhex(entry["bytes"])
    learnt, read = (np.array(entry[name], dtype=np.float32) for name in ("learnt", "read"))
    assert encode_vector(learnt, entry["dtype"]) == payload
    assert payload_digest(payload).hex() == entry["digest"]
    np.testing.assert_array_equal(decode_vector(payload, entry["dtype"]), read)


def test_every_compression_has_a_payload() -> None:
    wanted = get_args(RoundSpec.model_fields["compression"].annotation)
    assert {entry["dtype"] for entry in VECTORS} == set(wanted)
    assert set(get_args(UpdateHeader.model_fields["dtype"].annotation)) == set(wanted)


# --- chunks and digests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"), [(0, 1), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (3 * CHUNK_BYTES, 3)]
)
def test_chunks_cover_the_payload(size: int, count: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    parts = list(chunks(data))
    assert len(parts) == chunk_count(size) == count
    assert b"".join(parts) == data
    assert all(len(part) <= CHUNK_BYTES for part in parts)


def test_every_half_is_the_float_that_numpy_makes_of_it() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(decode_vector(halves.tobytes(), "fp16"), halves.astype(np.float32))


def test_the_digest_is_a_hash_of_chunk_hashes() -> None:
    data = np.random.default_rng(7).bytes(CHUNK_BYTES + 5)
    leaves = [blake3(part).digest() for part in (data[:CHUNK_BYTES], data[CHUNK_BYTES:])]
    expected = blake3(leaves[0] + leaves[1]).digest()
    assert payload_digest(data) == digest_of_hashes(map(chunk_hash, chunks(data))) == expected
    assert payload_digest(data[:-1]) != expected


def test_the_digest_of_a_vector_sees_one_changed_bit() -> None:
    vector = np.arange(10, dtype=np.float32)
    changed = vector.copy()
    changed[3] = np.nextafter(changed[3], np.float32(9))
    assert vector_digest(vector) == payload_digest(vector.astype("<f4").tobytes())
    assert vector_digest(changed) != vector_digest(vector)
