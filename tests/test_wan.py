"""The emulated link: what arrives, when it does at the earliest, and what a cut or a stall looks like."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from benchmarks.wan import CHUNK, Wan, Way, reset

HOST = "127.0.0.1"
PATIENCE = 60.0
"""Seconds for what must happen in the end, on a machine that is busy."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[int]:
    """A server on this machine; its port."""
    server = await asyncio.start_server(handler, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


class Sink:
    """A server that keeps what it hears, in order, of each connection."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        self.ends: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        try:
            while data := await reader.read(CHUNK):
                heard += data
            self.ends.append("end")
        except ConnectionError:
            self.ends.append("reset")
        writer.close()

    @property
    def bytes(self) -> int:
        return sum(map(len, self.heard))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # of many kinds of things
            await asyncio.sleep(0.005)


async def round_trip(port: int, message: bytes = b"?") -> float:
    """Seconds for a message and its echo, the connection already there."""
    reader, writer = await asyncio.open_connection(HOST, port)
    await ask(reader, writer, message)
    began = now()
    await ask(reader, writer, message)
    took = now() - began
    writer.close()
    return took


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(message)
    async with asyncio.timeout(PATIENCE):
        assert await reader.readexactly(len(message)) == message


def now() -> float:
    return asyncio.get_running_loop().time()


# --- what arrives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [float("inf"), 5e6])
async def test_everything_arrives_in_order_both_ways(bandwidth: float) -> None:
    source = random.Random(1)
    pieces = [source.randbytes(source.randrange(1, 3 * CHUNK)) for _ in range(40)]
    async with listening(echo) as target, Wan(0.01, jitter=0.01, bandwidth=bandwidth) as wan:
        reader, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        async with asyncio.timeout(PATIENCE):
            assert await reader.read(-1) == b"".join(pieces)
        await sending
        writer.close()
        assert wan.there.carried == wan.back.carried == sum(map(len, pieces))
        await until(lambda: wan.connections == 0)


async def test_the_end_comes_after_the_data_and_the_other_way_stays_open() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read(-1))).encode())
        writer.close()

    async with listening(answer) as target, Wan(0.02) as wan:
        reader, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        writer.write(bytes(300_000))
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            assert await reader.read(-1) == b"300000"
        writer.close()


async def test_a_reset_is_handed_on() -> None:
    sink = Sink()
    async with listening(sink) as target, Wan(0.02) as wan:
        _, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        writer.write(b"half a sen")
        await until(lambda: sink.bytes == 10)
        reset(writer)
        await until(lambda: sink.ends == ["reset"])
        await until(lambda: wan.connections == 0)


async def test_who_sends_learns_that_the_receiver_is_gone() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reset(writer)

    async with listening(leave) as target, Wan(0.02) as wan:
        _, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    writer.write(bytes(CHUNK))
                    await writer.drain()
                    await asyncio.sleep(0.001)


async def test_a_target_that_refuses_ends_the_connection() -> None:
    async with listening(echo) as target:
        pass
    async with Wan(0.01) as wan:
        reader, _writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(PATIENCE):
                await reader.read(1)
        await until(lambda: wan.connections == 0)


async def test_many_links_in_one_process() -> None:
    async with listening(echo) as target, AsyncExitStack() as stack:
        links = [await stack.enter_async_context(Wan(0.001 * number)) for number in range(20)]
        ports = [await link.forward(HOST, target) for link in links]
        assert len({*ports, target}) == 21
        trips = await asyncio.gather(*(round_trip(port, b"%d" % port) for port in ports))
        assert all(trip >= 2 * link.delay for trip, link in zip(trips, links, strict=True))


# --- when, at the earliest --------------------------------------------------------------------------


async def test_a_round_trip_takes_twice_the_delay_and_so_does_a_handshake() -> None:
    async with listening(echo) as target, Wan(0.05) as wan:
        port = await wan.forward(HOST, target)
        began = now()
        reader, writer = await asyncio.open_connection(HOST, port)
        await ask(reader, writer, b"first")
        assert now() - began >= 0.2
        writer.close()
        assert await round_trip(port) >= 0.1
        wan.delay = 0.1
        assert wan.there.delay == wan.back.delay == 0.1
        assert await round_trip(port) >= 0.2


async def test_the_ways_may_differ() -> None:
    async with listening(echo) as target, Wan(0.0, back=Way(0.1)) as wan:
        assert await round_trip(await wan.forward(HOST, target)) >= 0.1


async def test_delay_holds_up_no_one_who_comes_later() -> None:
    """A megabyte is under way before the first byte of it has arrived."""
    sink = Sink()
    async with listening(sink) as target, Wan() as wan:
        _, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        writer.write(b"?")
        await until(lambda: sink.bytes == 1)
        wan.delay = 3600.0
        writer.write(bytes(2**20))
        await until(lambda: wan.in_flight == 2**20)
        assert sink.bytes == 1


async def test_no_more_is_under_way_than_the_limit() -> None:
    sink, limit = Sink(), 4 * CHUNK
    async with listening(sink) as target, Wan(in_flight=limit) as wan:
        _, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        writer.write(b"?")
        await until(lambda: sink.bytes == 1)
        wan.stall()
        writer.write(bytes(2**23))
        await until(lambda: wan.in_flight >= limit)
        await asyncio.sleep(0.1)
        assert wan.in_flight < limit + CHUNK
        wan.heal()
        await until(lambda: sink.bytes == 2**23 + 1)


@pytest.mark.parametrize("connections", [1, 4])
async def test_bandwidth_is_shared_by_all_connections(connections: int) -> None:
    async with listening(echo) as target, Wan(bandwidth=1e6) as wan:
        port = await wan.forward(HOST, target)
        began = now()
        await asyncio.gather(*(round_trip(port, bytes(100_000 // connections)) for _ in range(connections)))
        # 200 kB each way. The way back is another link, and both are used at once.
        assert now() - began >= 0.2


async def test_jitter_is_drawn_from_the_seed() -> None:
    way = Way(delay=0.1, jitter=0.05)
    drawn = [[way.latency(random.Random(seed)) for seed in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert 0.05 <= min(drawn[0]) < 0.08 < 0.12 < max(drawn[0]) <= 0.15
    assert Way(delay=0.0, jitter=0.0).latency(random.Random(0)) == 0
    assert min(Way(delay=0.01, jitter=0.05).latency(random.Random(seed)) for seed in range(50)) == 0


# --- a bad day --------------------------------------------------------------------------------------


async def test_a_cut_ends_all_connections_and_refuses_new_ones_until_it_heals() -> None:
    sink = Sink()
    async with listening(sink) as target, Wan(0.01) as wan:
        port = await wan.forward(HOST, target)
        connections = [await asyncio.open_connection(HOST, port) for _ in range(3)]
        for _, writer in connections:
            writer.write(b"?")
        await until(lambda: sink.bytes == 3)
        wan.cut()
        for reader, _ in connections:
            with pytest.raises(ConnectionResetError):
                async with asyncio.timeout(PATIENCE):
                    await reader.read(1)
        await until(lambda: sink.ends == ["reset"] * 3 and wan.connections == 0)
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, port)
        late = await wan.forward(HOST, target)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, late)

        wan.heal()
        for number, open_port in enumerate((port, late), start=4):
            _, writer = await asyncio.open_connection(HOST, open_port)
            writer.write(b"?")
            await until(lambda number=number: sink.bytes == number)
            writer.close()


async def test_what_is_under_way_is_lost_in_a_cut() -> None:
    sink = Sink()
    async with listening(sink) as target, Wan() as wan:
        _, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        writer.write(b"?")
        await until(lambda: sink.bytes == 1)
        wan.stall()
        writer.write(b"lost")
        await until(lambda: wan.in_flight == 4)
        wan.cut()
        wan.heal()
        await until(lambda: sink.ends)
        assert sink.heard == [b"?"]


async def test_a_stall_keeps_everything_for_later() -> None:
    async with listening(echo) as target, Wan(0.01) as wan:
        port = await wan.forward(HOST, target)
        reader, writer = await asyncio.open_connection(HOST, port)
        await ask(reader, writer, b"before")
        carried = wan.there.carried
        wan.stall()
        writer.write(b"during")
        _, other = await asyncio.open_connection(HOST, port)  # a new one seems to be there, too
        other.write(b"more")
        await asyncio.sleep(0.1)
        assert wan.there.carried == carried
        assert wan.connections == 2
        wan.heal()
        async with asyncio.timeout(PATIENCE):
            assert await reader.readexactly(6) == b"during"
        await until(lambda: wan.there.carried == carried + len(b"duringmore"))
        writer.close()
        other.close()


async def test_damage_flips_one_bit_of_a_piece_until_it_heals() -> None:
    async with listening(echo) as target, Wan() as wan:
        reader, writer = await asyncio.open_connection(HOST, await wan.forward(HOST, target))
        await ask(reader, writer, b"before")
        wan.damage(corrupt=1.0)
        sent = bytes(1000)
        writer.write(sent)
        heard = await reader.readexactly(len(sent))
        assert sum(byte.bit_count() for byte in heard) in (0, 2)  # one each way, perhaps the same
        wan.there.corrupt = 0.0
        writer.write(sent)
        assert sum(byte.bit_count() for byte in await reader.readexactly(len(sent))) == 1
        wan.heal()
        await ask(reader, writer, b"after")
        writer.close()


async def test_a_stream_that_is_cut_short_ends_in_the_middle() -> None:
    sink = Sink()
    async with listening(sink) as target, Wan() as wan:
        port = await wan.forward(HOST, target)
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"whole")
        await until(lambda: sink.bytes == 5)
        wan.damage(truncate=1.0)
        writer.write(bytes(1000))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(PATIENCE):
                await reader.read(1)
        await until(lambda: sink.ends and wan.connections == 0)
        assert 5 <= sink.bytes <= 505
        wan.heal()
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(bytes(1000))
        await until(lambda: len(sink.heard[-1]) == 1000)
        writer.close()


async def test_at_the_end_ports_are_free_and_connections_gone() -> None:
    sink = Sink()
    async with listening(sink) as target:
        async with Wan() as wan:
            port = await wan.forward(HOST, target)
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"?")
            await until(lambda: sink.bytes == 1)
        assert wan.connections == 0
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        await until(lambda: sink.ends)
        again = await asyncio.start_server(echo, HOST, port)
        again.close()
