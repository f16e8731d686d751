"""What links ask of libp2p: streams to a peer by its id alone, also where no address of it can be dialled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from spheroid_node.wire.records import PREFIX


class Stream(NamedTuple):
    """A stream, and the peer at its other end, whose key libp2p's handshake has proven."""

    peer: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str = ""
    """The IP address that the peer's connection comes from, or that of its relay; empty if unknown."""


Accept = Callable[[Stream], None]
"""Takes a stream that a peer has opened; from then on the stream is the taker's to close."""


class StreamFailed(ConnectionError):
    """No stream came about; its text says why, in a few words."""


class Streams(Protocol):
    """A node's libp2p, which may be away for a while and come back."""

    async def open(self, peer: str, name: str, timeout: float) -> Stream:
        """A stream to what ``peer`` serves as ``name``. Raises :class:`StreamFailed`, TimeoutError."""

    async def serve(self, name: str, accept: Accept) -> None:
        """Have ``accept`` take the streams that peers open to ``name``. Raises :class:`DhtFailed`."""

    async def stop_serving(self, name: str) -> None:
        """Take no further ones."""


def link_name(run_id: str) -> str:
    """The name under which a node of the run takes links over libp2p."""
    return f"/{PREFIX}/{run_id}/link"
