"""Measuring how far nodes are, over real sockets."""

from __future__ import annotations

import asyncio
import socket

from spheroid_node.net.distance import measure_distances
from spheroid_node.wire.messages import HopAddress


def address(peer: str, port: int, host: str = "127.0.0.1") -> HopAddress:
    return HopAddress(peer=peer, host=host, port=port)


async def test_who_answers_is_measured_and_who_does_not_is_left_out() -> None:
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = await measure_distances(
        [
            address("here", port),
            address("closed", closed.getsockname()[1]),
            address("no name", port, "no host \u2022 at all"),
        ]
    )
    assert [*found] == ["here"] and 0 < found["here"] < 3
    assert connections >= 1
    server.close()
    closed.close()
