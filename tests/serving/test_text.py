"""Prompts in, text out, steps cut to size, and what it cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.errors import PromptInvalid
from spheroid_node.serving.chain import Sweep
from spheroid_node.serving.prompts import prompt_bytes
from spheroid_node.serving.stats import Measure
from spheroid_node.serving.steps import Piece, positions_per_step, split
from spheroid_node.serving.utf8 import Utf8Stream
from spheroid_node.wire.frames import MAX_FRAME
from tests.serving.memory import small_model


@given(st.one_of(st.text().map(str.encode), st.binary()), st.lists(st.integers(0, 40)))
def test_a_stream_says_what_the_whole_would(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    edges = [0, *sorted(cuts), len(data)]
    parts = [stream.feed(data[start:end]) for start, end in pairwise(edges)]
    assert "".join(parts) + stream.finish() == data.decode("utf-8", errors="replace")


@given(st.text(min_size=1))
def test_a_character_appears_whole_with_its_last_byte(text: str) -> None:
    stream = Utf8Stream()
    for character in text.encode("utf-8", "ignore").decode():
        *start, last = character.encode()
        assert stream.feed(bytes(start)) == ""
        assert stream.feed(bytes([last])) == character
    assert stream.finish() == ""


def test_prompts() -> None:
    assert prompt_bytes("Ä", 2) == b"\xc3\x84"
    assert prompt_bytes(b"abc", 3) == b"abc"
    for prompt, complaint in [
        ("", "is empty"),
        (b"", "is empty"),
        ("ÄÄ", "has 4 bytes; the window of this run has 3"),
        ("a\udcff", "is not UTF-8"),
        (b"\xff", "is not UTF-8"),
    ]:
        with pytest.raises(PromptInvalid, match=complaint):
            prompt_bytes(prompt, 3)


@given(st.binary(min_size=1, max_size=40), st.integers(0, 9), st.data(), st.integers(10, 15))
def test_pieces_cover_a_step_in_order(tokens: bytes, masked: int, data: st.DataObject, size: int) -> None:
    step = Piece(5, tokens, masked, data.draw(st.integers(1, len(tokens) + masked)))
    pieces = [*split(step, size)]
    position, decided = 5, []
    for piece in pieces:
        assert piece.position == position and piece.tokens and piece.count <= size
        assert 0 <= piece.decide <= piece.count
        position = piece.end
        decided += [*range(piece.first_decided, piece.end + 1)]
    assert position == step.end
    assert b"".join(piece.tokens for piece in pieces) == tokens
    assert [piece.masked for piece in pieces] == [0] * (len(pieces) - 1) + [masked]
    assert decided == [*range(step.first_decided, step.end + 1)]


def test_masked_positions_need_a_known_byte_before_them() -> None:
    with pytest.raises(ValueError, match="10 masked positions"):
        [*split(Piece(0, b"abc", masked=10), 10)]


def test_a_step_fits_in_a_frame() -> None:
    run = small_model(readout="mean").run
    wide = run.model_copy(update={"model": run.model.model_copy(update={"width": 4096, "window": 4096})})
    assert positions_per_step(run) == run.model.window
    assert 64 < positions_per_step(wide) * (2 * 4096 + 256) * 4 < MAX_FRAME


async def test_statistics() -> None:
    class Chain:
        async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
            return Sweep(position + len(tokens), b"xy", None, (0.25, 0.75))

        async def write(
            self, position: int, tokens: bytes, count: int, drafts: int = 0
        ) -> AsyncIterator[Sweep]:
            for line in (0, 0, 1):
                yield Sweep(position, b"z", None, (0.25, 0.75), line)

        async def close(self) -> None: ...

    ticks: Iterator[float] = iter([10.0, 11.0, 14.0, 15.0, 16.0, 17.0])
    measure = Measure(clock=lambda: next(ticks))
    chain, stats = measure.chain(Chain()), measure.stats
    assert stats.bytes_per_sweep == 0 and stats.seconds_per_hop == []
    await chain.sweep(0, b"abc")
    await chain.sweep(3, b"x")
    assert (stats.sweeps, stats.bytes, stats.first_byte, stats.total) == (2, 4, 1.0, 4.0)
    assert stats.seconds_per_hop == [0.25, 0.75]
    assert stats.lines() == [
        "4 bytes in 4.00 s, 1.0 bytes/s, the first after 1.00 s",
        "2 sweeps, 2.00 bytes a sweep",
        "compute a hop and sweep: 250.0 · 750.0 ms",
    ]
    assert [sweep.line async for sweep in chain.write(4, b"y", 3)] == [0, 0, 1]
    assert (stats.sweeps, stats.bytes) == (4, 7)  # a line is one sweep in however many pieces
