"""Streams between nodes through the libp2p daemon, whichever of them runs at the moment."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any

from spheroid_node.errors import DhtFailed
from spheroid_node.net._hivemind import (
    PeerID,
    Request,
    Response,
    StreamOpenRequest,
    read_pbmsg_safe,
    write_pbmsg,
)
from spheroid_node.net.reader import BUFFER_BYTES
from spheroid_node.net.streams import Accept, Stream, StreamFailed

REGISTER_TIMEOUT = 10.0
FORGET_TIMEOUT = 2.0
MAX_CAUSE = 200
"""Characters of what the daemon says; it lists every address that it has tried."""


class DaemonStreams:
    """The :class:`Streams` of a DHT peer, which attaches every daemon that it starts."""

    def __init__(self) -> None:
        self._p2p: Any = None
        self._attached = asyncio.Event()
        self._served: dict[str, Accept] = {}

    async def attach(self, p2p: Any) -> None:
        """Use this daemon, and let it hand us what it handed us before. Raises what hivemind raises."""
        told: set[str] = set()
        while names := self._served.keys() - told:  # services may come and go meanwhile
            name = names.pop()
            await _register(p2p, name, self._served[name])
            told.add(name)
        self._p2p = p2p
        self._attached.set()

    def detach(self) -> None:
        """The daemon is gone or going: wait for the next."""
        self._attached.clear()
        self._p2p = None

    async def open(self, peer: str, name: str, timeout: float) -> Stream:
        async with asyncio.timeout(timeout):
            await self._attached.wait()
            return await _open(self._p2p, peer, name, timeout)

    async def serve(self, name: str, accept: Accept) -> None:
        self._served[name] = accept
        if self._p2p is None:  # the next one will be told
            return
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                await _register(self._p2p, name, accept)
        except Exception as error:
            raise DhtFailed(f"no links over libp2p: {error or type(error).__name__}") from error

    async def stop_serving(self, name: str) -> None:
        self._served.pop(name, None)
        with suppress(Exception):  # a daemon that is dying forgets by itself
            async with asyncio.timeout(FORGET_TIMEOUT):
                await self._p2p.remove_binary_stream_handler(name)


async def _register(p2p: Any, name: str, accept: Accept) -> None:
    async def handler(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accept(Stream(info.peer_id.to_base58(), reader, writer, _ip_address(str(info.addr))))

    await p2p.add_binary_stream_handler(name, handler)


def _ip_address(multiaddress: str) -> str:
    """Of /ip4/…/tcp/…; names have no place in the address of a connection."""
    match multiaddress.split("/"):
        case ["", "ip4" | "ip6", address, *_]:
            return address
    return ""


async def _open(p2p: Any, peer: str, name: str, timeout: float) -> Stream:
    """As hivemind's ``call_binary_stream_handler``, which leaves the connection open when it fails."""
    try:
        target = PeerID.from_base58(peer).to_bytes()
    except ValueError as error:
        raise StreamFailed(f"{peer[:64]!r} is no peer id") from error
    socket = p2p.daemon_listen_maddr["unix"]
    try:
        reader, writer = await asyncio.open_unix_connection(socket, limit=BUFFER_BYTES)
    except OSError as error:
        raise StreamFailed("the libp2p daemon does not answer") from error
    try:
        opening = StreamOpenRequest(peer=target, proto=[name], timeout=math.ceil(timeout))
        await write_pbmsg(writer, Request(type=Request.STREAM_OPEN, streamOpen=opening))
        response = Response()
        await read_pbmsg_safe(reader, response)
        if response.type == Response.ERROR:
            raise StreamFailed(_words(response.error.msg))
        return Stream(PeerID(response.streamInfo.peer).to_base58(), reader, writer)
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, asyncio.IncompleteReadError | OSError) and not isinstance(error, StreamFailed):
            raise StreamFailed("the libp2p daemon ended") from error
        raise


def _words(cause: str) -> str:
    if "routing: not found" in cause:
        return "no peer knows an address of it"
    if "protocols not supported" in cause:
        return "it takes no links of this run"
    # "failed to dial: failed to dial PEER: all dials failed", then a line for each address
    return " ".join(cause.rpartition("all dials failed")[2].split())[:MAX_CAUSE]
