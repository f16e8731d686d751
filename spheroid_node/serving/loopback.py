"""A chain through hop services in this process, over real links on loopback, and what a sweep of it costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from spheroid_node.model.composed import Hop
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.links import Link, LinkServer, Traffic, dial
from spheroid_node.run import RunSpec
from spheroid_node.serving.hop import HopService
from spheroid_node.serving.remote import Generation, RemoteChain
from spheroid_node.serving.routes import Route, RouteHop
from spheroid_node.serving.sessions import Limits
from spheroid_node.wire.messages import HopAddress

HOST = "127.0.0.1"
PATIENCE = 3600.0
"""Seconds. A sweep of a large shape may take longer than a hop or a client of a swarm would wait."""
LIMITS = Limits(idle_seconds=PATIENCE, cache_bytes=1 << 50)


@dataclass(frozen=True)
class SweepCost:
    """What one sweep took."""

    seconds: float
    """From the request to the last decided byte."""
    hop_seconds: tuple[float, ...]
    """Of this, compute time of each hop."""
    bytes: int
    """Of all frames, each counted once."""

    @property
    def rest(self) -> float:
        """Seconds in which nothing was computed: messages were packed, encrypted, sent, and waited."""
        return self.seconds - sum(self.hop_seconds)


async def time_sweeps(hops: Sequence[Hop], positions: int, sweeps: int) -> list[SweepCost]:
    """Cost of each of ``sweeps`` sweeps, which bring ``positions`` new positions each and decide at all.

    A sweep goes on from the text of the one before; one more goes before them and does not count. Raises
    :class:`HopFailed`, :class:`ChainLost`.
    """
    costs = []
    traffic = Traffic()
    async with loopback_chain(hops, traffic) as chain:
        position, tokens = 0, bytes(positions)
        for _ in range(1 + sweeps):
            sent, began = traffic.sent, perf_counter()
            sweep = await chain.sweep(position, tokens, decide=positions)
            costs.append(SweepCost(perf_counter() - began, sweep.seconds, traffic.sent - sent))
            position, tokens = position + positions, sweep.tokens
    return costs[1:]


@asynccontextmanager
async def loopback_chain(
    hops: Sequence[Hop], traffic: Traffic, generation: Generation | None = None
) -> AsyncIterator[RemoteChain]:
    """A chain through a link server and a hop service for each of ``hops``.

    All compute in one thread: they share a machine, and two at once would only take turns on it. ``traffic``
    counts what the client and all hops send.
    """
    run = hops[0].run
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(1))
        addresses = []
        for hop in hops:
            identity = ephemeral_identity()
            server = _server(run, hop, identity, traffic, executor)
            await server.start()
            stack.push_async_callback(server.stop)
            addresses.append(HopAddress(peer=identity.peer, host=HOST, port=server.port))
        route = Route(0, tuple(RouteHop(address, 0) for address in addresses))
        client = partial(_dial, run, ephemeral_identity(), traffic)
        chain = await RemoteChain.open(run, route, client, generation or Generation(), silence=PATIENCE)
        stack.push_async_callback(chain.close)
        yield chain


class Always:
    """A model source that has only one version."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop

    def hop_model(self, block_version: int, interface_version: int) -> Hop | None:
        return self._hop


def _server(run: RunSpec, hop: Hop, identity: Identity, traffic: Traffic, executor: Executor) -> LinkServer:
    dial_on = partial(_dial, run, identity, traffic)
    service = HopService(run, hop.index, Always(hop), dial_on, executor, LIMITS)
    return LinkServer(identity, run, HOST, 0, {"hop": service.handle}, traffic)


async def _dial(run: RunSpec, identity: Identity, traffic: Traffic, address: HopAddress) -> Link:
    return await dial(address, identity, run.run_id, "hop", traffic)
