"""The internet between two programs of this machine: a TCP proxy that is far away, narrow, cut or stalled.

The kernel's own emulator (netem) needs privileges that test machines rarely give. Here a program listens on
its port as ever, and others dial the port of a proxy before it:

    async with Wan(delay=0.05, jitter=0.01, bandwidth=2e6) as wan:
        port = await wan.forward("127.0.0.1", data_port)

A :class:`Wan` is the link of one machine, and all that is forwarded through it shares its bandwidth. Delay is
latency alone: what is read is stamped with its time of arrival and waits for it beside any number of others.
Data crosses as a stream, so there is neither loss nor reordering, as TCP above a real link shows none; only
:meth:`Wan.damage` flips bits and cuts streams short, as broken routers do. A busy machine makes a link slower
than was asked for, never faster.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

CHUNK = 16 * 1024
"""Bytes that are read and booked at a time: connections take turns on a narrow link."""

IN_FLIGHT = 4 * 2**20
"""Bytes that a connection may have under way in one direction; then its sender has to wait."""

BOOKED_AHEAD = 0.02
"""Seconds of a link's time that are given away in advance, so that a late timer leaves no gap."""

BACKLOG = 128


@dataclass
class Way:
    """One direction of a link. Its fields may be set at any time; what is under way arrives as planned."""

    delay: float = 0.0
    """Seconds from one end to the other."""
    jitter: float = 0.0
    """Seconds by which it may be more or less, uniformly. Within a connection order is kept."""
    bandwidth: float = math.inf
    """Bytes a second, of all connections together."""
    carried: int = field(default=0, init=False)
    """Bytes handed over at the far end so far."""
    corrupt: float = field(default=0.0, init=False)
    """Share of the pieces handed over in which one bit is wrong."""
    truncate: float = field(default=0.0, init=False)
    """Share of the pieces of which only half is handed over, and then the connection breaks."""
    _free: float = field(default=0.0, init=False)
    """When the link has sent all that is booked."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def book(self, size: int) -> float:
        """When the last of ``size`` bytes leaves the near end, by the loop's clock."""
        now = asyncio.get_running_loop().time()
        if math.isinf(self.bandwidth):
            return now
        async with self._turn:
            await sleep_until(self._free - BOOKED_AHEAD)
            self._free = max(self._free, now) + size / self.bandwidth
            return self._free

    def latency(self, source: random.Random) -> float:
        """Seconds to the far end, drawn from ``source``."""
        return max(0.0, self.delay + source.uniform(-self.jitter, self.jitter))


class Wan:
    """A link, and the ports that are forwarded through it. Use as an asynchronous context manager."""

    def __init__(
        self,
        delay: float = 0.0,
        jitter: float = 0.0,
        bandwidth: float = math.inf,
        *,
        back: Way | None = None,
        seed: int = 0,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        """``back`` is the way from the targets; without it, it is like the way to them."""
        self.there = Way(delay, jitter, bandwidth)
        self.back = back or Way(delay, jitter, bandwidth)
        self.limit = in_flight
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._seed = seed
        self._up = True
        self._entrances: list[_Entrance] = []
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._accepted = 0

    async def __aenter__(self) -> Wan:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._connections)
        self.cut()
        for entrance in self._entrances:
            entrance.release()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def forward(self, host: str, port: int) -> int:
        """A port of 127.0.0.1 that leads to ``host``:``port``, where nothing need listen yet."""

        def accept(accepted: socket.socket) -> None:
            self._accept(accepted, host, port)

        entrance = _Entrance(accept)
        self._entrances.append(entrance)
        if self._up:
            entrance.open()
        return entrance.port

    @property
    def delay(self) -> float:
        """Seconds each way; when read, of the way there."""
        return self.there.delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        self.there.delay = self.back.delay = seconds

    def damage(self, *, corrupt: float = 0.0, truncate: float = 0.0) -> None:
        """From now on that share of the pieces that cross is damaged, both ways, until :meth:`heal`."""
        for way in (self.there, self.back):
            way.corrupt, way.truncate = corrupt, truncate

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    @property
    def in_flight(self) -> int:
        """Bytes under way, both ways."""
        return sum(pipe.held for link in self._connections.values() for pipe in link.pipes)

    def cut(self) -> None:
        """Break all connections, losing what is under way, and refuse new ones until :meth:`heal`."""
        self._up = False
        for entrance in self._entrances:
            entrance.close()
        for task, connection in self._connections.items():
            connection.abort()
            task.cancel()

    def stall(self) -> None:
        """Keep connections open, and take new ones, but hand nothing over until :meth:`heal`."""
        self.flowing.clear()

    def heal(self) -> None:
        """End a cut, a stall or damage. What a stall held up arrives now."""
        self.damage()
        self.flowing.set()
        if not self._up:
            self._up = True
            for entrance in self._entrances:
                entrance.open()

    def _accept(self, accepted: socket.socket, host: str, port: int) -> None:
        self._accepted += 1
        connection = _Connection(self, f"{self._seed} {self._accepted}")
        task = asyncio.get_running_loop().create_task(connection.run(accepted, host, port))
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)


class _Entrance:
    """A listening port that stays ours while it is closed."""

    def __init__(self, accept: Callable[[socket.socket], None]) -> None:
        self._accept = accept
        self._holder = _bound(0)
        self.port = int(self._holder.getsockname()[1])
        self._listener: socket.socket | None = None

    def open(self) -> None:
        self._listener = _bound(self.port)
        self._listener.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener, self._accept_one, self._listener)

    def close(self) -> None:
        """Whoever dials now is refused."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def release(self) -> None:
        """Give the port back."""
        self.close()
        self._holder.close()

    def _accept_one(self, listener: socket.socket) -> None:
        with suppress(OSError):  # who dialled has gone again
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            self._accept(accepted)


class _Connection:
    """A connection to a proxy and the one from it to the target: two pipes, one each way."""

    def __init__(self, wan: Wan, seed: str) -> None:
        self._wan, self._seed = wan, seed
        self._writers: list[asyncio.StreamWriter] = []
        self.pipes: list[_Pipe] = []

    async def run(self, accepted: socket.socket, host: str, port: int) -> None:
        """Until both sides have closed, one is gone, or it is cancelled."""
        wan = self._wan
        try:
            reader, writer = await asyncio.open_connection(sock=accepted)
            self._writers.append(writer)
            # The kernel has long shaken hands with who dialled; over a real link that takes a round trip,
            # and the target hears of the connection no earlier.
            await asyncio.sleep(wan.there.delay + wan.back.delay)
            await wan.flowing.wait()
            far_reader, far_writer = await asyncio.open_connection(host, port)
            self._writers.append(far_writer)
            there = _Pipe(wan, wan.there, reader, far_writer, random.Random(f"{self._seed} there"))
            back = _Pipe(wan, wan.back, far_reader, writer, random.Random(f"{self._seed} back"))
            self.pipes = [there, back]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(there.run(wan.back))
                tasks.create_task(back.run(wan.there))
        except* OSError:  # the target refused, or one side is gone: the other learns it
            self.abort()
        finally:
            for each in self._writers:
                each.close()

    def abort(self) -> None:
        """Break both connections at once."""
        for writer in self._writers:
            reset(writer)


class _Pipe:
    """One direction of a connection."""

    def __init__(
        self,
        wan: Wan,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: random.Random,
    ) -> None:
        self._wan, self._way, self._reader, self._writer, self._source = wan, way, reader, writer, source
        self._under_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        """Times of arrival and data; b"" is the end of the stream, None a reset."""
        self._room = asyncio.Event()
        self._room.set()
        self.held = 0
        """Bytes under way."""

    async def run(self, other: Way) -> None:
        """Until the stream has ended. Raises :class:`OSError` where the receiver is gone, as late as the
        sender learns it over the ``other`` way."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_in())
            tasks.create_task(self._hand_over(other))

    async def _take_in(self) -> None:
        arrival = 0.0
        while True:
            await self._room.wait()
            data = await self._read()
            size = len(data or b"")
            left = await self._way.book(size)
            arrival = max(arrival, left + self._way.latency(self._source))
            self._hold(size)
            self._under_way.put_nowait((arrival, data))
            if not data:
                return

    async def _read(self) -> bytes | None:
        try:
            return await self._reader.read(CHUNK)
        except OSError:
            return None

    async def _hand_over(self, other: Way) -> None:
        while True:
            arrival, data = await self._under_way.get()
            await sleep_until(arrival)
            await self._wan.flowing.wait()
            try:
                await self._write(data)
            except OSError:
                await asyncio.sleep(other.delay + other.jitter)
                raise
            if not data:
                return

    async def _write(self, data: bytes | None) -> None:
        if data is None:
            reset(self._writer)
        elif not data:
            self._writer.write_eof()
        else:
            await self._write_piece(data)

    async def _write_piece(self, data: bytes) -> None:
        cut = self._source.random() < self._way.truncate
        if self._source.random() < self._way.corrupt:
            data = _one_bit_wrong(data, self._source)
        self._writer.write(data[: len(data) // 2] if cut else data)
        await self._writer.drain()
        self._hold(-len(data))
        if cut:
            raise ConnectionAbortedError("cut short")
        self._way.carried += len(data)

    def _hold(self, size: int) -> None:
        self.held += size
        (self._room.set if self.held < self._wan.limit else self._room.clear)()


def _one_bit_wrong(data: bytes, source: random.Random) -> bytes:
    wrong = bytearray(data)
    wrong[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(wrong)


async def sleep_until(time: float) -> None:
    """Return at ``time`` of the loop's clock or after it, never before."""
    loop = asyncio.get_running_loop()
    while (left := time - loop.time()) > 0:  # noqa: ASYNC110  # a timer of uvloop may be a little early
        await asyncio.sleep(left)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close at once and tell the other side that it was no orderly end (RST)."""
    with suppress(OSError):  # it is closed already
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def _bound(port: int) -> socket.socket:
    """A socket on 127.0.0.1; several may be bound to one port, of which one listens."""
    # asyncio turns off the waiting for more to send (TCP_NODELAY) only where the protocol is named.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setblocking(False)
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound
