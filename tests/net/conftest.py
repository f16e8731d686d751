"""A small run, identities, and links and DHT peers that are surely gone after a test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.links import Link, LinkFailed, LinkServer, Traffic, dial
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec
from spheroid_node.wire.messages import HopAddress


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that nodes run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def run() -> RunSpec:
    return RunSpec(
        name="tiny",
        model=ModelSpec(blocks=3, layers=1, width=8, heads=2, window=16),
        round=RoundSpec(genesis=0.0, period=10.0, settle=2.0),
    )


@pytest.fixture
def alice() -> Identity:
    return ephemeral_identity()


@pytest.fixture
def bob() -> Identity:
    return ephemeral_identity()


class Net:
    """Starts servers and dials them; everything ends with the test."""

    def __init__(self, run: RunSpec, stack: AsyncExitStack) -> None:
        self.run = run
        self.stack = stack
        self.traffic = Traffic()

    async def serve(
        self,
        identity: Identity,
        service: Callable[[Link], Awaitable[None]],
        run: RunSpec | None = None,
        **limits: Any,
    ) -> HopAddress:
        services = {"round": service, "transfer": service, "hop": service}
        server = LinkServer(identity, run or self.run, "127.0.0.1", 0, services, Traffic(), **limits)
        await server.start()
        self.stack.push_async_callback(server.stop)
        return HopAddress(peer=identity.peer, host="127.0.0.1", port=server.port)

    async def dial_when_free(self, address: HopAddress, identity: Identity, seconds: float = 20.0) -> Link:
        """Dial again and again: a link counts until its server has seen it end."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await self.dial(address, identity)
                except LinkFailed:
                    await asyncio.sleep(0.02)

    async def dial(
        self, address: HopAddress, identity: Identity, service: str = "transfer", timeout: float = 10.0
    ) -> Link:
        link = await dial(address, identity, self.run.run_id, service, self.traffic, timeout)
        self.stack.push_async_callback(link.close)
        return link


@pytest.fixture
async def net(run: RunSpec) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        yield Net(run, stack)
