"""Frames come out as they went in, whatever pieces they came in."""

from __future__ import annotations

import asyncio
import tracemalloc
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.net.reader import SMALL_BYTES, FrameReader


class Transport:
    """Remembers whether it may read. As uvloop's, it is none of asyncio's classes."""

    def __init__(self) -> None:
        self.reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def reader(limit: int = 1000) -> tuple[FrameReader, Transport]:
    made, transport = FrameReader(limit), Transport()
    made.set_transport(cast(asyncio.ReadTransport, transport))
    return made, transport


@given(st.lists(st.integers(0, 30_000), max_size=12), st.lists(st.integers(0, 30_000), max_size=12))
def test_what_is_read_is_what_came(arrive: list[int], wanted: list[int]) -> None:
    data = bytes(index * 7 % 251 for index in range(30_000))

    async def read() -> bytes:
        made, _ = reader()
        bounds = sorted({0, len(data), *arrive})
        for start, end in pairwise(bounds):
            made.feed_data(data[start:end])
        cuts = sorted({0, len(data), *wanted})
        return b"".join([await made.readexactly(end - start) for start, end in pairwise(cuts)])

    assert asyncio.run(read()) == data


async def test_a_reader_waits_for_all_of_a_frame() -> None:
    made, _ = reader()
    reading = asyncio.create_task(made.readexactly(6))
    for piece in (b"ab", b"cd", b"efgh"):
        assert not reading.done()
        made.feed_data(piece)
        await asyncio.sleep(0)
    assert await reading == b"abcdef"
    assert await made.readexactly(2) == b"gh"


async def test_a_read_that_is_broken_off_loses_nothing() -> None:
    made, _ = reader()
    made.feed_data(b"ab")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await made.readexactly(4)
    made.feed_data(b"cd")
    assert await made.readexactly(4) == b"abcd"


async def test_the_end_says_what_was_left() -> None:
    made, _ = reader()
    reading = asyncio.create_task(made.readexactly(4))
    await asyncio.sleep(0)
    made.feed_data(b"ab")
    assert not made.at_eof()
    made.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError) as ended:
        await reading
    assert ended.value.partial == b"ab"
    assert made.at_eof()


async def test_a_broken_connection_raises_what_broke_it() -> None:
    made, _ = reader()
    reading = asyncio.create_task(made.readexactly(4))
    await asyncio.sleep(0)
    made.set_exception(ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError, match="gone"):
        await reading
    made.feed_data(b"abcd")
    with pytest.raises(ConnectionResetError, match="gone"):
        await made.readexactly(4)


async def test_who_sends_more_than_is_read_has_to_wait() -> None:
    made, transport = reader(limit=1000)
    made.feed_data(bytes(2000))
    assert transport.reads
    made.feed_data(bytes(1))
    assert not transport.reads
    await made.readexactly(1000)
    assert not transport.reads
    await made.readexactly(1)
    assert transport.reads


async def test_a_frame_may_be_larger_than_the_buffer() -> None:
    made, transport = reader(limit=1000)
    made.feed_data(bytes(5000))
    assert not transport.reads
    reading = asyncio.create_task(made.readexactly(9000))
    await asyncio.sleep(0)
    assert transport.reads
    made.feed_data(bytes(3999))
    assert transport.reads
    made.feed_data(bytes(1))
    assert len(await reading) == 9000


@pytest.mark.parametrize("size", [1, SMALL_BYTES - 1, SMALL_BYTES])
def test_many_small_pieces_take_little_more_than_their_bytes(size: int) -> None:
    async def fill() -> int:
        made, _ = reader(limit=2**30)
        tracemalloc.start()
        try:
            for _ in range(300_000 // size):
                made.feed_data(bytes(size))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert asyncio.run(fill()) < 500_000
