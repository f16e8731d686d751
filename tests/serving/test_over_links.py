"""The hop protocol over real connections: TCP, TLS and greetings on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.links import Link, LinkServer, Traffic, dial
from spheroid_node.serving.chain import ChainLost
from spheroid_node.serving.decoders import autoregressive
from spheroid_node.serving.finding import ChainFinder
from spheroid_node.serving.hop import HopService
from spheroid_node.serving.local import LocalChain
from spheroid_node.serving.remote import Generation, RemoteChain
from spheroid_node.wire.codes import ErrorCode
from spheroid_node.wire.messages import HopAddress
from spheroid_node.wire.records import NodeRecord
from tests.serving.memory import DEADLINE, Models, node_record, small_model, until

MODEL = small_model()
RUN = MODEL.run


class Loopback:
    """A link server for every block, and a directory that names them."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.traffic = Traffic()
        self.services: list[HopService] = []
        self.servers: list[LinkServer] = []
        self._records: list[dict[str, NodeRecord]] = []
        self._executor = executor

    async def start(self) -> None:
        for block in range(RUN.model.blocks):
            identity, traffic = ephemeral_identity(), Traffic()
            service = HopService(
                RUN, block, Models(MODEL, block), self._dialler(identity, traffic), self._executor
            )
            server = LinkServer(identity, RUN, "127.0.0.1", 0, {"hop": service.handle}, traffic)
            await server.start()
            record = node_record(RUN, block, host="127.0.0.1", port=server.port)
            self.services.append(service)
            self.servers.append(server)
            self._records.append({identity.peer: record})

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        return self._records[block]

    async def chain(self, seed: int, temperature: float) -> RemoteChain:
        client = self._dialler(ephemeral_identity(), self.traffic)
        return await ChainFinder(self, RUN, client, Generation(seed, temperature, logits=True)).open()

    def _dialler(self, identity: Identity, traffic: Traffic):  # type: ignore[no-untyped-def]
        async def hop(address: HopAddress) -> Link:
            return await dial(address, identity, RUN.run_id, "hop", traffic)

        return hop


@pytest.fixture
async def loopback(executor: ThreadPoolExecutor) -> AsyncIterator[Loopback]:
    swarm = Loopback(executor)
    await swarm.start()
    yield swarm
    await asyncio.gather(*(server.stop() for server in swarm.servers))


async def test_text_and_logits_equal_local(loopback: Loopback) -> None:
    remote, local = await loopback.chain(3, 0.9), LocalChain(MODEL, 3, 0.9, logits=True)
    prompt = b"The castle was old"
    texts = [
        b"".join([part async for part in autoregressive(chain, prompt, 40)]) for chain in (remote, local)
    ]
    assert texts[0] == texts[1]
    sweeps = [await chain.sweep(0, prompt, masked=4, decide=12) for chain in (remote, local)]
    np.testing.assert_allclose(sweeps[0].logits, sweeps[1].logits, atol=1e-4)  # type: ignore[arg-type]
    assert sweeps[0].tokens == sweeps[1].tokens and len(sweeps[0].seconds) == 3
    assert loopback.traffic.sent and loopback.traffic.received
    await remote.close()
    await until(lambda: not any(service.sessions for service in loopback.services))


@pytest.mark.parametrize("block", [0, 1, 2])
async def test_a_node_that_leaves_loses_the_chain_and_is_named(loopback: Loopback, block: int) -> None:
    chain = await loopback.chain(0, 0.0)
    await chain.sweep(0, b"The")
    await loopback.services[block].stop()
    await loopback.servers[block].stop()
    with pytest.raises(ChainLost) as lost:
        async with asyncio.timeout(DEADLINE):
            while True:
                await chain.sweep(3, b"x")
    assert lost.value.block == block
    # Its own word and its neighbour's come by two connections, in any order.
    assert lost.value.code in (ErrorCode.LEAVING, ErrorCode.NEXT_HOP_LOST)
    await chain.close()
    others = [service for index, service in enumerate(loopback.services) if index != block]
    await until(lambda: not any(service.sessions for service in others))
