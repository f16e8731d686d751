"""How far other nodes are: the time that a TCP connection takes to come about is one round trip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from spheroid_node.wire.messages import HopAddress

CONNECT_SECONDS = 3.0
TRIES = 2
AT_ONCE = 8


async def measure_distances(addresses: Iterable[HopAddress]) -> dict[str, float]:
    """Seconds one way by peer, the least of a few tries; who does not answer is left out.

    A bare connection, which the other side closes when no TLS handshake follows.
    """
    turn = asyncio.Semaphore(AT_ONCE)

    async def measure(address: HopAddress) -> tuple[str, float | None]:
        async with turn:
            tries = [await _round_trip(address.host, address.port) for _ in range(TRIES)]
        known = [seconds for seconds in tries if seconds is not None]
        return address.peer, min(known) / 2 if known else None

    found = await asyncio.gather(*map(measure, addresses))
    return {peer: seconds for peer, seconds in found if seconds is not None}


async def _round_trip(host: str, port: int) -> float | None:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError):  # ValueError: a name that is none
        return None
    seconds = time.perf_counter() - began
    writer.transport.abort()
    return seconds
