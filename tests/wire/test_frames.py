"""Frames: what goes in comes out, however the stream is cut, and nothing is believed before it is checked."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import (
    HEADER,
    MAX_CONTAINERS,
    MAX_FRAME,
    MAX_ITEMS,
    FrameDecoder,
    encode_frame,
    frame_length,
    pack,
    unpack,
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
values = st.recursive(
    scalars | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_packed_values_come_back(value: Any) -> None:
    assert unpack(pack(value)) == value


@given(st.lists(st.dictionaries(st.text(), scalars), max_size=5), st.data())
def test_frames_come_back_however_the_stream_is_cut(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(fields) for fields in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder()
    bodies = [
        body
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for body in decoder.feed(stream[start:end])
    ]
    assert [unpack(body) for body in bodies] == messages


def test_a_frame_waits_for_its_last_byte() -> None:
    frame = encode_frame({"type": "welcome"})
    decoder = FrameDecoder()
    assert decoder.feed(frame[:-1]) == []
    assert decoder.feed(frame[-1:]) == [frame[HEADER.size :]]


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 2**32 - 1])
def test_a_length_outside_the_limit_is_refused_before_the_body_comes(length: int) -> None:
    with pytest.raises(WireError) as caught:
        FrameDecoder().feed(HEADER.pack(length))
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_the_limit_itself_is_allowed() -> None:
    assert frame_length(HEADER.pack(MAX_FRAME)) == MAX_FRAME
    body = pack({"data": bytes(100)})
    assert encode_frame({"data": bytes(100)}, limit=len(body))[HEADER.size :] == body
    with pytest.raises(WireError, match="too-large"):
        encode_frame({"data": bytes(100)}, limit=len(body) - 1)


@given(st.binary(max_size=300))
def test_random_bytes_unpack_or_are_malformed(data: bytes) -> None:
    try:
        unpack(data)
    except WireError as error:
        assert error.code is ErrorCode.MALFORMED


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack(1) + pack(2),
        pack({"key": "value"})[:-1],
        msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        b"\xa2\xff\xff",  # text that is not UTF-8
        b"\xdd\xff\xff\xff\xff",  # an array that claims 2^32 - 1 entries
        b"\xdf\xff\xff\xff\xff",  # a map that does
        b"\xc6\xff\xff\xff\xff",  # bytes that do
        b"\xdb\xff\xff\xff\xff",  # text that does
        b"\x91" * 5000 + b"\xc0",  # nested beyond any stack
        pack([0] * (MAX_ITEMS + 1)),
        pack("x" * 65_537),
    ],
    ids=lambda data: data[:12].hex() or "empty",
)
def test_what_no_peer_may_send_is_malformed(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        unpack(data)
    assert caught.value.code is ErrorCode.MALFORMED


def _peak_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_claimed_lengths_allocate_nothing() -> None:
    assert _peak_bytes(b"\xc6\x00\x3f\xff\xff") < 1_000_000
    assert _peak_bytes(b"\xdc\xff\xff" * 1000) < 1_000_000
    deep = b"\xdc" + MAX_ITEMS.to_bytes(2, "big")
    assert _peak_bytes(deep * 1000) < 20_000_000


def test_a_frame_full_of_empty_maps_costs_little_memory() -> None:
    """A byte on the wire must not become sixty in memory, four million times."""
    thousand = b"\xdc" + MAX_ITEMS.to_bytes(2, "big") + b"\x80" * MAX_ITEMS
    full = b"\xdc\x03\xe8" + thousand * 1000
    assert len(full) < MAX_FRAME
    assert _peak_bytes(full) < 1_000_000


@settings(max_examples=20)
@given(st.integers(1, MAX_CONTAINERS + 50))
def test_the_number_of_containers_is_limited(count: int) -> None:
    for empty in ({}, []):
        halves = [[empty] * (count // 2), [empty] * (count - count // 2)]
        if count + 3 <= MAX_CONTAINERS:
            assert unpack(pack(halves)) == halves
        else:
            with pytest.raises(WireError, match="arrays and maps"):
                unpack(pack(halves))
