"""Links that other nodes open: accepted over TLS and libp2p, greeted, and handed to a service."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any

import structlog

from spheroid_node.net.dialling import Dialler, LinkFailed, dial
from spheroid_node.net.greeting import receive_greeting
from spheroid_node.net.identity import Identity
from spheroid_node.net.limits import Allowances, Rates
from spheroid_node.net.link import Link, LinkClosed, Traffic
from spheroid_node.net.ports import listening_socket
from spheroid_node.net.reader import FrameReader
from spheroid_node.net.streams import Stream, Streams, link_name
from spheroid_node.net.tls import server_context
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Welcome

__all__ = ["Dialler", "Link", "LinkClosed", "LinkFailed", "LinkServer", "Traffic", "dial"]

log = structlog.get_logger()

Service = Callable[[Link], Awaitable[None]]
Work = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]

DEFAULT_RATES = Rates()
METERED = frozenset({"round", "transfer"})
"""A hop limits its sessions itself, and their messages are many and small."""
OUT_OF_FILES_PAUSE = 0.5


class LinkServer:
    """Serves ``services`` by name: to who dials ``host``:``port`` (0: any free one), and over ``streams``.

    The server's certificate is self-signed with its node key, so TLS proves the key and the client compares
    it with the peer id it dialled. The client proves its own peer id by signing the server's nonce.

    max_connections: links at once, later ones are closed unheard; half of them, at most, from one address;
    max_per_peer: links of one peer at once; max_strangers: connections of one address at once whose peer is
    not proven yet, later ones are closed unheard; handshake_timeout: seconds for TLS, and for the greeting;
    rates: what one peer may ask of the services in METERED, past which its messages are read more slowly.
    """

    def __init__(
        self,
        identity: Identity,
        run: RunSpec,
        host: str,
        port: int,
        services: Mapping[str, Service],
        traffic: Traffic,
        *,
        streams: Streams | None = None,
        max_connections: int = 256,
        max_per_peer: int = 32,
        max_strangers: int = 128,
        rates: Rates = DEFAULT_RATES,
        handshake_timeout: float = 10.0,
        option: str = "--data-port",
    ) -> None:
        self.port = port
        self._identity = identity
        self._run = run
        self._host = host
        self._services = services
        self._traffic = traffic
        self._streams = streams
        self._max_connections = max_connections
        self._max_per_address = max(1, max_connections // 2)
        self._max_per_peer = max_per_peer
        self._max_strangers = max_strangers
        self._allowances = Allowances(rates, time.monotonic)
        self._handshake_timeout = handshake_timeout
        self._option = option
        self._context = server_context(identity)
        self._tasks: set[asyncio.Task[None]] = set()
        self._of_address: Counter[str] = Counter()
        self._of_peer: Counter[str] = Counter()
        self._strangers: Counter[str] = Counter()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Begin to listen. Raises :class:`PortInUse`, :class:`ConfigInvalid`, :class:`DhtFailed`."""
        self._listener = listening_socket(self._host, self.port, self._option)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = asyncio.create_task(self._accept(self._listener), name="links.accept")
        if self._streams is not None:
            await self._streams.serve(link_name(self._run.run_id), self._accept_stream)

    async def stop(self) -> None:
        """Stop listening and close all links; peers are told that we leave."""
        self._stopping = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._streams is not None:
            await self._streams.stop_serving(link_name(self._run.run_id))

    # --- two ways in ------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # most likely out of file descriptors
                log.warning("links.accept_failed", cause=str(error))
                await asyncio.sleep(OUT_OF_FILES_PAUSE)
                continue
            if self._admits(origin := _origin(address[0])):
                self._begin(origin, functools.partial(self._serve_connection, connection, origin))
            else:
                connection.close()

    def _accept_stream(self, stream: Stream) -> None:
        if self._stopping or not self._admits(origin := _origin(stream.address)):
            stream.writer.transport.abort()
            return
        link = Link(stream.reader, stream.writer, "", self._traffic, via="libp2p", proven=stream.peer)
        self._begin(origin, functools.partial(self._serve, link, origin))

    def _admits(self, origin: str) -> bool:
        """Whether there is room for one more stranger of that address."""
        if len(self._tasks) >= self._max_connections:
            log.warning("links.full", connections=len(self._tasks))
            return False
        return self._strangers[origin] < self._max_strangers

    def _begin(self, origin: str, work: Work) -> None:
        """Do ``work`` in a task; what it is given it calls once it knows the peer, a stranger until then."""
        self._strangers[origin] += 1
        task = asyncio.create_task(self._beginning_as_a_stranger(origin, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beginning_as_a_stranger(self, origin: str, work: Work) -> None:
        with contextlib.ExitStack() as stranger:
            stranger.callback(_one_less, self._strangers, origin)
            await work(stranger.close)

    async def _serve_connection(
        self, connection: socket.socket, origin: str, known: Callable[[], None]
    ) -> None:
        """One connection from TCP to its end."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.timeout(self._handshake_timeout):
                link = await self._open(connection)
        except (OSError, ssl.SSLError) as error:  # TimeoutError is an OSError
            log.debug("links.no_tls", cause=str(error) or "timed out")
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        await self._serve(link, origin, known)

    async def _open(self, connection: socket.socket) -> Link:
        loop = asyncio.get_running_loop()
        reader = FrameReader()
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_timeout
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return Link(reader, writer, "", self._traffic)

    # --- from the greeting on, both are the same --------------------------------------------------

    async def _serve(self, link: Link, origin: str, known: Callable[[], None]) -> None:
        """One link to its end; ``known`` is called once its peer is. No exception but cancellation leaves."""
        try:
            await self._greet_and_serve(link, origin, known)
        except WireError as error:
            log.info("links.closed", peer=link.peer, code=error.code, detail=error.detail)
            await link.fail(error)
        except TimeoutError:
            await link.fail(WireError(ErrorCode.TIMED_OUT))
        except LinkClosed:
            await link.close()
        except asyncio.CancelledError:
            await link.fail(WireError(ErrorCode.LEAVING))
            raise
        except Exception:
            log.exception("links.service_failed", peer=link.peer)
            await link.fail(WireError(ErrorCode.INTERNAL))
        else:
            await link.close()

    async def _greet_and_serve(self, link: Link, origin: str, known: Callable[[], None]) -> None:
        async with asyncio.timeout(self._handshake_timeout):
            greeting = await receive_greeting(link, self._identity, self._run, self._services)
        known()
        link.peer = greeting.peer
        with (
            _one_of(self._of_peer, link.peer, self._max_per_peer, "peer"),
            # Keys are free: a limit of each peer alone would leave all links to who makes seven.
            _one_of(self._of_address, origin, self._max_per_address, "address"),
        ):
            await link.send(Welcome())
            if greeting.service in METERED:
                link.allowance = self._allowances.of(link.peer)
            await self._services[greeting.service](link)


def _origin(address: str) -> str:
    """What counts as one address: of IPv6 its first 64 bits, since whoever has one has all that begin so."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64))
    return str(parsed)


@contextlib.contextmanager
def _one_of(counts: Counter[str], who: str, most: int, what: str) -> Iterator[None]:
    """One more connection of ``who`` while this lasts. Raises :class:`WireError` past ``most``."""
    if counts[who] >= most:
        raise WireError(ErrorCode.BUSY, f"{most} connections of one {what} are the limit")
    counts[who] += 1
    try:
        yield
    finally:
        _one_less(counts, who)


def _one_less(counts: Counter[str], who: str) -> None:
    counts[who] -= 1
    if not counts[who]:
        del counts[who]
