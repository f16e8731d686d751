"""Trimmed mean and median: against numpy, from disk, and against those who mean harm."""

from __future__ import annotations

import tracemalloc
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.aggregation import Accumulator
from spheroid_node.rounds.robust import Keep, LateClipper, Sorter
from spheroid_node.wire.tensors import (
    INT8_ELEMENTS,
    PART_ELEMENTS,
    Vector,
    chunks,
    decode_vector,
    encode_vector,
)


def on_disk(folder: Path) -> Keep:
    return lambda: TemporaryFile(dir=folder)


def added(sorter: Sorter, vectors: list[Vector], dtype: str = "float32", scale: float = 1.0) -> Sorter:
    for vector in vectors:
        sorter.add(chunks(encode_vector(vector, dtype)), dtype, 1.0, scale)
    return sorter


@given(
    st.lists(st.lists(st.floats(-100, 100, width=16), min_size=3, max_size=3), min_size=1, max_size=9),
    st.floats(0, 0.5),
)
def test_it_is_what_numpy_makes_of_the_sorted_values(rows: list[list[float]], trim: float) -> None:
    vectors = [np.array(row, np.float32) for row in rows]
    cut = min(int(trim * len(rows)), (len(rows) - 1) // 2)
    expected = np.sort(vectors, axis=0)[cut : len(rows) - cut].mean(axis=0)
    np.testing.assert_allclose(added(Sorter(3, trim, BytesIO), vectors).mean(), expected, atol=1e-4)
    if trim == 0.5:
        np.testing.assert_allclose(expected, np.median(vectors, axis=0), atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_half_of_each_end_leaves_the_median(count: int) -> None:
    vectors = [np.random.default_rng(seed).normal(size=7).astype(np.float32) for seed in range(count)]
    found = added(Sorter(7, 0.5, BytesIO), vectors).mean()
    np.testing.assert_allclose(found, np.median(vectors, axis=0), rtol=1e-6)


def test_nothing_left_out_is_the_mean_of_all() -> None:
    vectors = [np.random.default_rng(seed).normal(size=5).astype(np.float32) for seed in range(4)]
    mean = Accumulator(5)
    for vector in vectors:
        mean.add(chunks(encode_vector(vector, "float32")), "float32", 1.0)
    np.testing.assert_allclose(added(Sorter(5, 0.0, BytesIO), vectors).mean(), mean.mean(), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "fp16", "int8"])
def test_an_update_of_several_parts_comes_back_from_disk(tmp_path: Path, dtype: str) -> None:
    elements = 2 * PART_ELEMENTS + INT8_ELEMENTS + 17
    vectors = [np.random.default_rng(seed).normal(size=elements).astype(np.float32) for seed in range(3)]
    found = added(Sorter(elements, 0.5, on_disk(tmp_path)), vectors, dtype, 0.5).mean()
    sent = [decode_vector(encode_vector(vector, dtype), dtype) for vector in vectors]
    np.testing.assert_allclose(found, 0.5 * np.median(sent, axis=0), rtol=1e-6, atol=1e-7)
    assert not any(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_number_of_updates(tmp_path: Path) -> None:
    elements = 8 * PART_ELEMENTS
    peaks = []
    for count in (2, 6):
        sorter = Sorter(elements, 0.2, on_disk(tmp_path))
        payload = encode_vector(np.ones(elements, np.float32), "fp16")
        for _ in range(count):
            sorter.add(chunks(payload), "fp16", 1.0)
        tracemalloc.start()
        sorter.mean()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    whole_updates = 4 * elements * 4
    assert peaks[1] - peaks[0] < whole_updates / 2  # four more updates cost a part each, no more


@pytest.mark.parametrize("trim", [0.2, 0.5])
def test_one_of_six_cannot_move_it_past_the_others(trim: float) -> None:
    honest = [np.full(4, value, np.float32) for value in (1.0, 1.1, 1.2, 1.3, 1.4)]
    for hostile in (1e30, -1e30, -1.2):
        found = added(Sorter(4, trim, BytesIO), [*honest, np.full(4, hostile, np.float32)]).mean()
        assert (found >= 1.0).all() and (found <= 1.4).all()


def test_what_is_no_update_leaves_no_trace() -> None:
    sorter = Sorter(4, 0.2, BytesIO)
    for data in (b"", bytes(15), bytes(17)):
        with pytest.raises(ValueError, match="expected 16"):
            sorter.add([data], "float32", 1.0)
    for weight in (0.0, float("nan")):
        with pytest.raises(ValueError, match="weight"):
            sorter.add([bytes(16)], "float32", weight)
    with pytest.raises(ValueError, match="no updates"):
        sorter.mean()
    with pytest.raises(ValueError, match="left out"):
        Sorter(4, 0.6, BytesIO)


# --- clipped at the end ---------------------------------------------------------------------------


def test_of_the_first_round_no_update_is_longer_than_a_multiple_of_the_median(tmp_path: Path) -> None:
    clipper = LateClipper(4, 3.0, on_disk(tmp_path))
    honest = np.array([0.0, 0.0, 3.0, 4.0], np.float32)  # of norm 5
    for vector, weight in ((100 * honest, 2.0), (honest, 1.0), (-honest, 1.0), (0 * honest, 1.0)):
        clipper.add(chunks(encode_vector(vector, "float32")), "float32", weight)
    # Of three norms above 0 the median is 5: what was 500 long counts as 15, at its weight of 2 of 5.
    np.testing.assert_allclose(clipper.mean(), honest * (2 * 3 + 1 - 1 + 0) / 5, rtol=1e-6)
    with pytest.raises(ValueError, match="no updates"):
        clipper.mean()


def test_an_update_that_breaks_off_leaves_no_trace_in_the_clipper() -> None:
    clipper, one = LateClipper(3, 3.0, BytesIO), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="update of 5 bytes"):
        clipper.add([b"short"], "float32", 1.0)
    with pytest.raises(ValueError, match="weight"):
        clipper.add(chunks(encode_vector(one, "float32")), "float32", 0.0)
    clipper.add(chunks(encode_vector(one, "float32")), "float32", 1.0)
    assert clipper.mean().tolist() == [1.0, 1.0, 1.0]
