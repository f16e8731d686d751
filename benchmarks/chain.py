"""A chain of hop processes on loopback, its links as slow as one likes, and a client of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hop import LOOPBACK
from benchmarks.wan import Wan
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.links import Link, Traffic, dial
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.serving.decoders import DecoderName, decode
from spheroid_node.serving.finding import ChainFinder
from spheroid_node.serving.remote import Generation, RemoteChain
from spheroid_node.serving.stats import GenerationStats, Measure
from spheroid_node.wire.messages import HopAddress
from spheroid_node.wire.records import HeldVersion, NodeRecord


@dataclass
class Replica:
    """A hop process."""

    process: asyncio.subprocess.Process
    block: int
    peer: str
    port: int

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


@dataclass(frozen=True)
class Timed:
    """A text, and how it came."""

    text: bytes
    seconds: float
    """From the request on an open chain to the last byte."""
    arrivals: tuple[float, ...]
    """When each part came, in seconds from the request."""
    stats: GenerationStats


class Swarm:
    """Hop processes by block. Whoever dials one goes through a proxy while there is one."""

    def __init__(self, run: RunSpec, model: Path) -> None:
        self.run, self.model = run, model
        self.replicas: list[Replica] = []
        self.ports: dict[str, int] = {}
        """Where a peer is dialled: its own port, or that of a proxy before it."""
        self.traffic = Traffic()
        self._identity = ephemeral_identity()

    async def start(self, block: int) -> Replica:
        """Another replica of ``block``; returns once it listens."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.hop", "--model", str(self.model), "--block", str(block),
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        told = json.loads(await process.stdout.readline())
        replica = Replica(process, block, told["peer"], told["port"])
        self.replicas.append(replica)
        self.ports[replica.peer] = replica.port
        return replica

    async def stop(self) -> None:
        for replica in self.replicas:
            replica.kill()
        await asyncio.gather(*(replica.process.wait() for replica in self.replicas))

    @asynccontextmanager
    async def delayed(self, seconds: float) -> AsyncIterator[None]:
        """Every link ``seconds`` long, one way; none is touched at 0."""
        before = dict(self.ports)
        async with Wan(delay=seconds) as wan:
            if seconds:
                for peer, port in before.items():
                    self.ports[peer] = await wan.forward(LOOPBACK, port)
            try:
                yield
            finally:
                self.ports = before

    # --- the client ---------------------------------------------------------------------------------

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        """As a directory. Killed replicas stay in it, as they do for a while in a swarm's."""
        return {
            replica.peer: record(self.run, block, self.ports[replica.peer])
            for replica in self.replicas
            if replica.block == block
        }

    async def dial(self, address: HopAddress) -> Link:
        return await dial(address, self._identity, self.run.run_id, "hop", self.traffic)

    def finder(self, seed: int, temperature: float) -> ChainFinder:
        return ChainFinder(self, self.run, self.dial, Generation(seed, temperature))

    @asynccontextmanager
    async def chain(self, seed: int, temperature: float) -> AsyncIterator[RemoteChain]:
        chain = await self.finder(seed, temperature).open()
        try:
            yield chain
        finally:
            await chain.close()

    async def text(
        self, decoder: DecoderName, prompt: bytes, count: int, seed: int = 0, temperature: float = 0.0
    ) -> Timed:
        async with self.chain(seed, temperature) as chain:
            measure, text, arrivals = Measure(), b"", []
            began = time.perf_counter()
            async for part in decode(decoder, self.run, measure.chain(chain), prompt, count):
                text += part
                arrivals.append(time.perf_counter() - began)
        return Timed(text, arrivals[-1], tuple(arrivals), measure.stats)


@asynccontextmanager
async def swarm_of(model: Path, replicas: int = 1) -> AsyncIterator[Swarm]:
    """``replicas`` processes for each block of an exported model."""
    from spheroid_node.training.checkpoint import import_model

    run, _ = import_model(model)
    swarm = Swarm(run, model)
    try:
        for block in range(run.model.blocks):
            for _ in range(replicas):
                await swarm.start(block)
        yield swarm
    finally:
        await swarm.stop()


def record(run: RunSpec, block: int, port: int) -> NodeRecord:
    """What a node would say of itself."""
    held = [
        HeldVersion(group=group, version=1, digest=bytes(32))
        for group in (block_group(block), INTERFACE_GROUP)
    ]
    return NodeRecord(
        run=run.run_id, block=block, state="online", host=LOOPBACK, port=port, device="cpu", started=0.0,
        round=0, held=held, serves=1, accepted=0, late=0, refused=0, led=0, tokens_per_second=0.0,
        train_loss=None, from_noise_ce=None, bytes_in=0, bytes_out=0, sessions=0, hop_seconds=0.0,
        neighbours=[],
    )  # fmt: skip
