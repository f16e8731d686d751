"""What a hop costs beyond its block's computation, beside echoes of as many bytes.

The hop stands between two connections of one process, which plays the hop before and the hop after: a state
goes in on one and comes out on the other. So it passes two links and one other process, as the bytes of an
echo do, and what is left after the computation is the hop's own: decryption, checks, scheduling, packing.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import ssl
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.chain import Swarm, swarm_of
from benchmarks.hop import LOOPBACK
from benchmarks.report import Found
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.links import Link, LinkServer
from spheroid_node.wire.messages import Attach, Attached, HopAddress, Open, Opened, State, decode
from spheroid_node.wire.tensors import pack_tensor

BLOCK = 1
HOP, BUSY_ECHO = "hop", "TLS echo that computes"
STEPS = 400
"""Positions and echoes a turn."""

Pass = Callable[[int], Awaitable[tuple[float, float]]]
"""One state or echo, by its number: seconds from the first byte out to the last byte in, and of them the
computation."""


async def measure(model: Any, turns: int) -> list[dict[str, Any]]:
    """A row each for the hop and the echoes: medians over turns of the medians of a turn, milliseconds.

    An echo answers at once, or after it has computed for as long as the hop.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(swarm_of(model))
        size = len(_state(swarm, bytes(16), 0).pack()) + 4
        for _ in range(turns):
            found[HOP].append(await _turn(through_hop(swarm)))
            computing = found[HOP][-1][1]
            found["TCP echo"].append(await _turn(echo("tcp", size)))
            found["TLS echo"].append(await _turn(echo("tls", size)))
            found["TCP echo that computes"].append(await _turn(echo("tcp", size, computing)))
            found[BUSY_ECHO].append(await _turn(echo("tls", size, computing)))
    return [
        {
            "what": name,
            "bytes": size,
            "ms": 1e3 * statistics.median(rest for rest, _ in pairs),
            "compute_ms": 1e3 * statistics.median(computed for _, computed in pairs),
            "turns_ms": [round(1e3 * rest, 4) for rest, _ in pairs],
        }
        for name, pairs in found.items()
    ]


async def _turn(opened: AbstractAsyncContextManager[Pass]) -> tuple[float, float]:
    """Medians: what is left without the computation, and the computation."""
    async with opened as one:
        passes = [await one(number) for number in range(STEPS)]
    rest = statistics.median(whole - computed for whole, computed in passes)
    return rest, statistics.median(computed for _, computed in passes)


@asynccontextmanager
async def echo(kind: str, size: int, busy: float = 0.0) -> AsyncIterator[Pass]:
    """``size`` bytes there and back over TCP or TLS."""
    arguments = [sys.executable, "-m", "benchmarks.echo", kind, str(size), str(busy)]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    try:
        context = None
        if kind == "tls":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(LOOPBACK, port, ssl=context)
        data = bytes(size)

        async def one(number: int) -> tuple[float, float]:
            began = time.perf_counter()
            writer.write(data)
            answer = await reader.readexactly(size + 8)
            return time.perf_counter() - began, float(np.frombuffer(answer[-8:])[0])

        yield one
        writer.close()
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def through_hop(swarm: Swarm) -> AsyncIterator[Pass]:
    """States of single positions into a middle hop and out of it."""
    identity, session = ephemeral_identity(), secrets.token_bytes(16)
    after: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def next_hop(link: Link) -> None:
        await link.expect(Attach)
        await link.send(Attached(session=session))
        after.set_result(link)
        await asyncio.Event().wait()

    server = LinkServer(identity, swarm.run, LOOPBACK, 0, {"hop": next_hop}, swarm.traffic)
    await server.start()
    replica = next(replica for replica in swarm.replicas if replica.block == BLOCK)
    address = HopAddress(peer=replica.peer, host=LOOPBACK, port=replica.port)
    client, before = await swarm.dial(address), await swarm.dial(address)
    try:
        here = HopAddress(peer=identity.peer, host=LOOPBACK, port=server.port)
        await client.send(_opening(session, here))
        await client.expect(Opened)
        await before.send(Attach(session=session))
        await before.expect(Attached)
        onward = await after

        async def one(number: int) -> tuple[float, float]:
            body = _state(swarm, session, number).pack()
            began = time.perf_counter()
            await before.send_body(body)
            answer = await onward.receive_body()
            seconds = time.perf_counter() - began
            state = decode(answer)
            assert isinstance(state, State)
            return seconds, state.seconds[-1]

        yield one
    finally:
        await asyncio.gather(client.close(), before.close())
        await server.stop()


def _opening(session: bytes, following: HopAddress) -> Open:
    return Open(
        session=session, block=BLOCK, block_version=1, interface_version=1, next=following, seed=0,
        temperature=0.7,
    )  # fmt: skip


def _state(swarm: Swarm, session: bytes, position: int) -> State:
    rows = np.random.default_rng(position).normal(size=(2, 1, swarm.run.model.width))
    return State(
        session=session,
        position=position,
        tokens=b"e",
        masked=0,
        decide=1,
        hidden=pack_tensor(rows[0], swarm.run.states),
        noisy=pack_tensor(rows[1], swarm.run.states),
        log_probs=None,
        seconds=[0.001],
    )


async def table(asked: argparse.Namespace, prompts: Sequence[bytes]) -> Found:
    """What a hop adds to a byte beyond its block's computation."""
    rows = await measure(asked.models / "chain", asked.trials)
    ms = {row["what"]: row["ms"] for row in rows}
    headline = {
        "hop_cost_ratio": round(ms[HOP] / ms[BUSY_ECHO], 3),
        "hop_cost_ratio_to_echo_at_once": round(ms[HOP] / ms["TLS echo"], 3),
        "hop_cost_ms": round(ms[HOP], 4),
    }
    return Found(rows, headline)
