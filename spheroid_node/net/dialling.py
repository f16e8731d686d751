"""Links to other nodes: over TCP + TLS, and where TCP does not reach, over libp2p (protocols/link.md)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass, field

import structlog
import uvloop

from spheroid_node.net.greeting import greet
from spheroid_node.net.identity import Identity
from spheroid_node.net.link import Link, LinkClosed, Traffic
from spheroid_node.net.reader import FrameReader
from spheroid_node.net.streams import StreamFailed, Streams, link_name
from spheroid_node.net.tls import certified_peer, client_context
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import HopAddress

log = structlog.get_logger()

DIAL_TIMEOUT = 10.0
TCP_SHARE = 0.3
"""Of the time-out, for a TCP connection, where libp2p has the rest."""
REMEMBERED_SECONDS = 60.0
"""For so long libp2p is tried first after TCP did not reach a peer and libp2p did."""
SERVER_NAME = "spheroid-node"
"""Name in the TLS handshake. It says nothing: the certificate is compared with the peer id instead."""


class LinkFailed(ConnectionError):
    """No link came about. ``code`` is the peer's reason, or ours, if it is one of the protocol's."""

    def __init__(self, address: HopAddress, cause: str, code: ErrorCode | None = None) -> None:
        super().__init__(f"{address.peer} at {address.host} port {address.port}: {cause}")
        self.code = code


class _NotReached(Exception):
    """One way does not lead to the peer. Its answer, whatever it is, is not this."""


@dataclass
class Dialler:
    """Dials the nodes of one run. Without ``streams`` there is only TCP."""

    identity: Identity
    run_id: str
    traffic: Traffic
    streams: Streams | None = None
    _stream_first: dict[HopAddress, float] = field(default_factory=dict)
    """Addresses that TCP did not reach and libp2p did, and until when (loop time) that counts."""

    async def dial(self, address: HopAddress, service: str, timeout: float = DIAL_TIMEOUT) -> Link:
        """A link to ``address`` for ``service`` (round, transfer or hop), greeted and welcomed.

        Raises :class:`LinkFailed` for every way in which that can go wrong; ``timeout`` is in seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._reach(address, service, timeout)
        except WireError as error:
            raise LinkFailed(address, str(error), error.code) from error
        except TimeoutError as error:
            raise LinkFailed(address, f"no answer in {timeout:g} s", ErrorCode.TIMED_OUT) from error
        except _NotReached as error:
            raise LinkFailed(address, str(error)) from error
        except OSError as error:
            raise LinkFailed(address, _words(error)) from error

    async def _reach(self, address: HopAddress, service: str, timeout: float) -> Link:
        """Raises :class:`_NotReached` where no way leads there; and what the peer's answer is worth."""
        if self.streams is None:
            return await self._over_tcp(address, service, None)
        ways = [(self._over_tcp, TCP_SHARE * timeout), (self._over_libp2p, (1 - TCP_SHARE) * timeout)]
        if self._stream_first.get(address, 0.0) > asyncio.get_running_loop().time():
            ways.reverse()
        causes = []
        for way, share in ways:
            try:
                link = await way(address, service, share)
            except _NotReached as error:
                causes.append(str(error))
            else:
                self._remember(address, link, causes)
                return link
        raise _NotReached("; ".join(causes))

    def _remember(self, address: HopAddress, link: Link, causes: list[str]) -> None:
        now = asyncio.get_running_loop().time()
        if link.via == "tcp":
            self._stream_first.pop(address, None)
        elif causes:  # TCP was tried, and in vain
            self._stream_first = {known: until for known, until in self._stream_first.items() if until > now}
            self._stream_first[address] = now + REMEMBERED_SECONDS
            log.info("links.over_libp2p", peer=address.peer, cause=causes[0])

    async def _over_tcp(self, address: HopAddress, service: str, timeout: float | None) -> Link:
        """``timeout``: seconds for the TCP connection. What fails after that is no matter of the way."""
        try:
            async with asyncio.timeout(timeout):
                connection = await _connect(address.host, address.port)
        except TimeoutError as error:
            raise _NotReached(f"no answer in {timeout:g} s") from error
        except OSError as error:
            raise _NotReached(_words(error)) from error
        except ValueError as error:  # what the codec of host names says to one that is none
            raise _NotReached(f"{address.host[:64]!r} is no host name") from error
        reader, writer = await _open(connection)
        proven = certified_peer(writer.get_extra_info("ssl_object"))
        return await self._greeted(
            Link(reader, writer, address.peer, self.traffic, via="tcp", proven=proven), service
        )

    async def _over_libp2p(self, address: HopAddress, service: str, timeout: float) -> Link:
        """``timeout``: seconds for all of it."""
        assert self.streams is not None
        try:
            async with asyncio.timeout(timeout):
                opened = await self.streams.open(address.peer, link_name(self.run_id), timeout)
                link = Link(
                    opened.reader, opened.writer, address.peer, self.traffic, via="libp2p", proven=opened.peer
                )
                return await self._greeted(link, service)
        except TimeoutError as error:
            raise _NotReached(f"over libp2p: no answer in {timeout:g} s") from error
        except LinkClosed as error:  # libp2p may open a stream first, and ask then whether the peer takes it
            raise _NotReached("over libp2p: it closed the connection") from error
        except StreamFailed as error:
            raise _NotReached(f"over libp2p: {error}") from error

    async def _greeted(self, link: Link, service: str) -> Link:
        try:
            if link.proven != link.peer:
                raise WireError(ErrorCode.NOT_AUTHENTIC, "its certificate belongs to another peer")
            await greet(link, self.identity, self.run_id, service)
        except BaseException:
            link.abort()
            raise
        return link


async def dial(
    address: HopAddress,
    identity: Identity,
    run_id: str,
    service: str,
    traffic: Traffic,
    timeout: float = DIAL_TIMEOUT,
) -> Link:
    """A link over TCP, for who has no libp2p. As :meth:`Dialler.dial`."""
    return await Dialler(identity, run_id, traffic).dial(address, service, timeout)


async def _connect(host: str, port: int) -> socket.socket:
    """A TCP connection to the first address of ``host`` that takes one."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, kind, protocol, _, where in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(connection, where)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return connection
    raise failure or OSError(f"{host} has no address")


async def _open(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """TLS on ``connection``, which belongs to the event loop from now on, whatever happens."""
    loop, reader = asyncio.get_running_loop(), FrameReader()
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.create_connection(
            lambda: protocol, sock=connection, ssl=client_context(), server_hostname=SERVER_NAME
        )
    except BaseException:
        if isinstance(loop, uvloop.Loop):
            # A peer that resets at once is noticed before uvloop has made the socket its own: it closes the
            # descriptor, and the socket would close it once more, when something else has its number.
            connection.detach()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return (
        os.strerror(error.errno).lower()
        if error.errno and error.errno > 0
        else str(error) or "it closed the connection"
    )
