"""Connections between nodes over TLS 1.3: dialled, accepted, and who is there proven (protocols/link.md).

The server's certificate is self-signed with its node key, so TLS proves the key and the client compares it
with the peer id it dialled. The client proves its own peer id by signing the server's nonce.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from spheroid_node.net.identity import Identity
from spheroid_node.net.link import BUFFER_BYTES, Link, LinkClosed, Traffic
from spheroid_node.net.ports import listening_socket
from spheroid_node.net.tls import client_context, server_context
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import PROTOCOL, ErrorCode, WireError
from spheroid_node.wire.messages import Greeting, Hello, HopAddress, Welcome
from spheroid_node.wire.signing import sign_bytes, verify_bytes

__all__ = ["Link", "LinkClosed", "LinkFailed", "LinkServer", "Traffic", "dial"]

log = structlog.get_logger()

Service = Callable[[Link], Awaitable[None]]

GREETING = "greeting"
"""Purpose of the signature in a Greeting."""
SERVER_NAME = "spheroid-node"
"""Name in the TLS handshake. It says nothing: the certificate is compared with the peer id instead."""
MEMBERS_ONLY = frozenset({"round"})
"""Services for peers that the run allows; reading and generating are open to everyone."""
OUT_OF_FILES_PAUSE = 0.5


class LinkFailed(ConnectionError):
    """No link came about. ``code`` is the peer's reason, or ours, if it is one of the protocol's."""

    def __init__(self, address: HopAddress, cause: str, code: ErrorCode | None = None) -> None:
        super().__init__(f"{address.peer} at {address.host} port {address.port}: {cause}")
        self.code = code


async def dial(
    address: HopAddress,
    identity: Identity,
    run_id: str,
    service: str,
    traffic: Traffic,
    timeout: float = 10.0,
) -> Link:
    """A link to ``address`` for ``service`` (round, transfer or hop), greeted and welcomed.

    Raises :class:`LinkFailed` for every way in which that can go wrong.
    """
    link: Link | None = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(
                address.host,
                address.port,
                ssl=client_context(),
                server_hostname=SERVER_NAME,
                limit=BUFFER_BYTES,
            )
            link = Link(reader, writer, address.peer, traffic)
            if link.certified_peer != address.peer:
                raise WireError(ErrorCode.NOT_AUTHENTIC, "its certificate belongs to another peer")
            await _greet(link, identity, run_id, service)
    except BaseException as error:
        if link is not None:
            link.abort()
        if isinstance(error, WireError):
            raise LinkFailed(address, str(error), error.code) from error
        if isinstance(error, TimeoutError):
            raise LinkFailed(address, f"no answer in {timeout:g} s", ErrorCode.TIMED_OUT) from error
        if isinstance(error, OSError):
            raise LinkFailed(address, _words(error)) from error
        if isinstance(error, ValueError):  # what the codec of host names says to one that is none
            raise LinkFailed(address, f"{address.host[:64]!r} is no host name") from error
        raise
    return link


async def _greet(link: Link, identity: Identity, run_id: str, service: Any) -> None:
    hello = await link.expect(Hello)
    if hello.peer != link.peer:
        raise WireError(ErrorCode.NOT_AUTHENTIC, f"it calls itself {hello.peer}")
    if hello.run != run_id:
        raise WireError(ErrorCode.WRONG_RUN, f"it belongs to run {hello.run}, we to {run_id}")
    version = min(PROTOCOL[1], hello.newest)
    if version < max(PROTOCOL[0], hello.oldest):
        theirs = f"{hello.oldest} to {hello.newest}"
        raise WireError(ErrorCode.WRONG_PROTOCOL, f"it speaks {theirs}, we {PROTOCOL[0]} to {PROTOCOL[1]}")
    signature = sign_bytes(identity.key, GREETING, greeting_bytes(hello.peer, hello.nonce))
    await link.send(
        Greeting(version=version, run=run_id, service=service, peer=identity.peer, signature=signature)
    )
    await link.expect(Welcome)


def greeting_bytes(server: str, nonce: bytes) -> bytes:
    """What a client signs. The server's name in it keeps one server from passing a greeting on to another."""
    return server.encode() + nonce


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return (
        os.strerror(error.errno).lower()
        if error.errno and error.errno > 0
        else str(error) or "it closed the connection"
    )


class LinkServer:
    """Listens on ``host``:``port`` (0: any free one) and serves ``services`` by name.

    max_connections: links at once, later ones are closed unheard; max_per_peer: links of one peer at once;
    handshake_timeout: seconds from TCP connection to Welcome.
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
        max_connections: int = 256,
        max_per_peer: int = 32,
        handshake_timeout: float = 10.0,
        option: str = "--data-port",
    ) -> None:
        self.port = port
        self._identity = identity
        self._run = run
        self._host = host
        self._services = services
        self._traffic = traffic
        self._max_connections = max_connections
        self._max_per_peer = max_per_peer
        self._handshake_timeout = handshake_timeout
        self._option = option
        self._context = server_context(identity)
        self._tasks: set[asyncio.Task[None]] = set()
        self._of_peer: Counter[str] = Counter()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen. Raises :class:`PortInUse`, :class:`ConfigInvalid`."""
        self._listener = listening_socket(self._host, self.port, self._option)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = asyncio.create_task(self._accept(self._listener), name="links.accept")

    async def stop(self) -> None:
        """Stop listening and close all links; peers are told that we leave."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # most likely out of file descriptors
                log.warning("links.accept_failed", cause=str(error))
                await asyncio.sleep(OUT_OF_FILES_PAUSE)
                continue
            if len(self._tasks) >= self._max_connections:
                log.warning("links.full", connections=len(self._tasks))
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """One connection from TCP to its end. No exception leaves here but cancellation."""
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
        try:
            await self._serve_link(link)
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

    async def _open(self, connection: socket.socket) -> Link:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_timeout
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return Link(reader, writer, "", self._traffic)

    async def _serve_link(self, link: Link) -> None:
        async with asyncio.timeout(self._handshake_timeout):
            greeting = await self._greet(link)
        link.peer = greeting.peer
        if self._of_peer[link.peer] >= self._max_per_peer:
            raise WireError(ErrorCode.BUSY, f"{self._max_per_peer} connections of one peer are the limit")
        self._of_peer[link.peer] += 1
        try:
            await link.send(Welcome())
            await self._services[greeting.service](link)
        finally:
            self._of_peer[link.peer] -= 1
            if not self._of_peer[link.peer]:
                del self._of_peer[link.peer]

    async def _greet(self, link: Link) -> Greeting:
        oldest = max(PROTOCOL[0], self._run.protocol[0])
        newest = min(PROTOCOL[1], self._run.protocol[1])
        run, us, nonce = self._run.run_id, self._identity.peer, secrets.token_bytes(32)
        await link.send(Hello(oldest=oldest, newest=newest, run=run, peer=us, nonce=nonce))
        greeting = await link.expect(Greeting)
        if greeting.run != run:
            raise WireError(ErrorCode.WRONG_RUN, f"this node belongs to run {run}, not to {greeting.run}")
        if not oldest <= greeting.version <= newest:
            raise WireError(ErrorCode.WRONG_PROTOCOL, f"this node speaks {oldest} to {newest}")
        if not verify_bytes(greeting.peer, GREETING, greeting_bytes(us, nonce), greeting.signature):
            raise WireError(ErrorCode.NOT_AUTHENTIC, "the greeting's signature does not hold")
        if greeting.service not in self._services:
            raise WireError(ErrorCode.NOT_FOUND, f"no service {greeting.service} here")
        if greeting.service in MEMBERS_ONLY and not self._run.allows(greeting.peer):
            raise WireError(ErrorCode.NOT_ALLOWED, f"{greeting.peer} is not on the list of run {run}")
        return greeting
