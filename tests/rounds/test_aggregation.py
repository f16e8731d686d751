from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.aggregation import Accumulator, PayloadMeter, payload_facts
from spheroid_node.rounds.outer import next_payload
from spheroid_node.run import TrainingSpec
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    INT8_ELEMENTS,
    Vector,
    chunks,
    decode_vector,
    encode_vector,
    payload_digest,
    vector_digest,
)

updates = st.lists(
    st.tuples(
        st.lists(st.floats(-100, 100, width=16), min_size=5, max_size=5),
        st.integers(1, 1_000_000),
        st.floats(0.01, 1.0),
    ),
    min_size=1,
    max_size=8,
)


def encoded(values: list[float] | Vector, dtype: str = "fp16") -> Iterator[memoryview]:
    return chunks(encode_vector(np.asarray(values, dtype=np.float32), dtype))


@given(updates)
def test_the_mean_is_weighted_and_scaled(updates: list[tuple[list[float], int, float]]) -> None:
    accumulator = Accumulator(5)
    for values, weight, scale in updates:
        accumulator.add(encoded(values), "fp16", weight, scale)
    weights = np.array([weight for _, weight, _ in updates], dtype=np.float64)
    scaled = np.array([np.array(values) * scale for values, _, scale in updates])
    np.testing.assert_allclose(accumulator.mean(), weights @ scaled / weights.sum(), rtol=1e-5, atol=1e-4)


def test_the_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no updates"):
        Accumulator(3).mean()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Accumulator(1).add(encoded([1.0]), "fp16", weight)


def test_an_update_that_breaks_off_leaves_no_trace() -> None:
    def torn(size: int) -> Iterator[memoryview]:
        yield memoryview(bytes([1] * size))
        raise OSError("disk")

    accumulator = Accumulator(3)
    accumulator.add(encoded([1.0, 2.0, 3.0]), "fp16", 10)
    with pytest.raises(OSError, match="disk"):
        accumulator.add(torn(4), "fp16", 10)
    for values in ([9.0, 9.0], [9.0] * 4):
        with pytest.raises(ValueError, match=r"of 4 bytes|of more than 6 bytes"):
            accumulator.add(encoded(values), "fp16", 10)
    assert accumulator.mean().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_memory_does_not_grow_with_the_number_of_updates(dtype: str) -> None:
    elements = 3 * CHUNK_BYTES // 2 // 2 + 7  # several chunks of fp16, the last one short
    payload = encode_vector(np.linspace(-1, 1, elements, dtype=np.float32), dtype)

    def peak(count: int) -> int:
        accumulator = Accumulator(elements)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            accumulator.add(chunks(payload), dtype, 3)
        np.testing.assert_allclose(accumulator.mean(), np.linspace(-1, 1, elements), atol=5e-3)
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        few, many = peak(2), peak(40)
    finally:
        tracemalloc.stop()
    assert many < few + len(payload) // 4


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_a_round_needs_room_for_the_parameters_and_one_update(dtype: str) -> None:
    elements = 8_000_003
    payload = encode_vector(np.ones(elements, dtype=np.float32), dtype)
    base = np.ones(elements, dtype=np.float32)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        accumulator = Accumulator(elements)
        for _ in range(3):
            payload_facts(chunks(payload), dtype)
            accumulator.add(chunks(payload), dtype, 3)
        vector_digest(next_payload(TrainingSpec(), base, accumulator.mean()))
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 4 * elements + len(payload) + 4 * CHUNK_BYTES


def test_chunks_need_not_end_at_whole_elements() -> None:
    payload = encode_vector(np.array([1.5, -2.5], dtype=np.float32), "fp16")
    accumulator = Accumulator(2)
    accumulator.add([payload[:1], payload[1:]], "fp16", 1)
    assert accumulator.mean().tolist() == [1.5, -2.5]


def test_int8_of_several_chunks_is_measured_and_added_as_a_whole() -> None:
    elements = 2 * CHUNK_BYTES + 77  # chunks cut blocks, and the last block is short
    vector = np.random.default_rng(5).standard_normal(elements).astype(np.float32)
    payload = encode_vector(vector, "int8")
    meter = PayloadMeter("int8", len(payload))
    for chunk in chunks(payload):
        assert not meter.complete
        meter.feed(chunk)
    assert (meter.complete, meter.count) == (True, 3)
    whole = decode_vector(payload, "int8")
    facts = meter.facts()
    assert (facts.size, facts.digest, facts.finite) == (len(payload), payload_digest(payload), True)
    assert facts.norm == pytest.approx(float(np.linalg.norm(whole.astype(np.float64))), rel=1e-12)
    accumulator = Accumulator(elements)
    accumulator.add(chunks(payload), "int8", 3.0, 0.5)
    np.testing.assert_array_equal(accumulator.mean(), np.float32(1.5) * whole / np.float32(3))


# --- facts ----------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=50),
    st.sampled_from(["fp16", "int8", "float32"]),
)
def test_facts_are_those_of_the_whole_payload(values: list[float], dtype: str) -> None:
    payload = encode_vector(np.array(values, dtype=np.float32), dtype)
    facts = payload_facts(chunks(payload), dtype)
    assert (facts.size, facts.digest, facts.finite) == (len(payload), payload_digest(payload), True)
    assert facts.norm == pytest.approx(float(np.linalg.norm(decode_vector(payload, dtype))), rel=1e-6)


@given(
    st.integers(1, 2 * INT8_ELEMENTS + 9),
    st.lists(st.integers(0, 2 * INT8_ELEMENTS + 17), max_size=5),
    st.sampled_from(["fp16", "int8", "float32"]),
)
def test_a_chunk_may_end_anywhere(elements: int, ends: list[int], dtype: str) -> None:
    payload = encode_vector(np.linspace(-3, 5, elements, dtype=np.float32), dtype)
    cuts = [0, *sorted(ends), len(payload)]
    facts = payload_facts([payload[a:b] for a, b in pairwise(cuts)], dtype)
    assert (facts.size, facts.finite) == (len(payload), True)
    assert facts.norm == pytest.approx(float(np.linalg.norm(decode_vector(payload, dtype))), rel=1e-5)


def test_facts_of_several_chunks() -> None:
    vector = np.ones(CHUNK_BYTES // 4 * 2 + 3, dtype=np.float32)
    payload = encode_vector(vector, "float32")
    meter = PayloadMeter("float32", len(payload))
    for index, chunk in enumerate(chunks(payload)):
        assert (meter.count, meter.complete) == (index, False)
        meter.feed(chunk)
    assert meter.complete
    assert meter.facts().digest == payload_digest(payload)
    assert meter.facts().norm == pytest.approx(len(vector) ** 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["fp16", "float32"])
def test_one_value_that_is_not_finite_shows(bad: float, dtype: str) -> None:
    payload = np.array([1.0, bad, 2.0], dtype="<f2" if dtype == "fp16" else "<f4").tobytes()
    facts = payload_facts(chunks(payload), dtype)
    assert not facts.finite
    assert facts.norm == float("inf")


def test_the_largest_float32_is_still_finite() -> None:
    for dtype in ("float32", "int8"):
        payload = encode_vector(np.full(1000, np.finfo(np.float32).max, dtype=np.float32), dtype)
        assert payload_facts(chunks(payload), dtype).finite


@pytest.mark.parametrize("scale", [-0.5, float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("block", [0, 1])
def test_one_scale_that_means_nothing_shows(scale: float, block: int) -> None:
    payload = bytearray(encode_vector(np.ones(INT8_ELEMENTS + 1, dtype=np.float32), "int8"))
    payload[block * 4100 : block * 4100 + 4] = np.array([scale], dtype="<f4").tobytes()
    facts = payload_facts(chunks(bytes(payload)), "int8")
    assert (facts.finite, facts.norm) == (False, float("inf"))


@pytest.mark.parametrize("cut", [[3], [8, 2], [12], [4, 6]])
def test_a_payload_cut_otherwise_than_agreed_is_malformed(cut: list[int]) -> None:
    meter = PayloadMeter("fp16", 10)
    with pytest.raises(WireError, match="malformed"):
        for size in cut:
            meter.feed(bytes(size))


def test_an_int8_payload_cut_anywhere_is_malformed() -> None:
    payload = encode_vector(np.ones(INT8_ELEMENTS + 5, dtype=np.float32), "int8")
    for cut in range(len(payload)):
        meter = PayloadMeter("int8", len(payload))
        with pytest.raises(WireError, match="malformed"):
            meter.feed(payload[:cut])
        assert meter.count == 0


@pytest.mark.parametrize(("size", "dtype"), [(3, "fp16"), (6, "float32"), (4, "int8"), (4104, "int8")])
def test_half_an_element_is_malformed(size: int, dtype: str) -> None:
    with pytest.raises(WireError, match="malformed"):
        payload_facts([bytes(size)], dtype)
