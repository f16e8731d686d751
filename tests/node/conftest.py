"""Nodes in one event loop: real links and stores, a directory in memory, a clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from spheroid_node.net.directory import Directory
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.links import LinkServer
from spheroid_node.net.transfer import serve_transfer
from spheroid_node.node.access import Client
from spheroid_node.node.collecting import Collector
from spheroid_node.node.holdings import held_fields
from spheroid_node.node.submitting import Submitter
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.versions import VersionStore
from spheroid_node.rounds.forks import precedence
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.wire.messages import HopAddress, Manifest, UpdateHeader
from spheroid_node.wire.records import NodeRecord


@pytest.fixture
def run() -> RunSpec:
    return RunSpec(
        name="node-tests",
        seed=3,
        model=ModelSpec(blocks=2, layers=1, width=16, heads=2, window=8),
        training=TrainingSpec(local_steps=100, batch=2),
        round=RoundSpec(genesis=0.0, period=100.0, settle=20.0),
    )


@dataclass
class Clock:
    """DHT time, standing still until a test moves it."""

    now: float = 10.0
    note: str = ""

    def time(self) -> float:
        return self.now


@dataclass
class World:
    """What all nodes of a test share."""

    run: RunSpec
    clock: Clock = field(default_factory=Clock)
    records: dict[str, NodeRecord] = field(default_factory=dict)
    published: dict[tuple[int, str], NodeRecord] = field(default_factory=dict)
    manifests: dict[str, dict[str, bytes]] = field(default_factory=dict)


class MemoryDirectory:
    """The part of :class:`Directory` that nodes use, for one peer."""

    def __init__(self, world: World, peer: str) -> None:
        self._world, self._peer = world, peer

    async def all_nodes(self, blocks: int) -> dict[str, NodeRecord]:
        return dict(self._world.records)

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        records = {(record.block, peer): record for peer, record in self._world.records.items()}
        records |= self._world.published
        return {peer: record for (of_block, peer), record in records.items() if of_block == block}

    async def publish_node(self, record: NodeRecord) -> None:
        self._world.published[record.block, self._peer] = record

    async def publish_manifest(self, group: str, sealed: bytes) -> None:
        self._world.manifests.setdefault(group, {})[self._peer] = sealed

    async def manifests(self, group: str, elements: int | None = None) -> list[tuple[str, Manifest, bytes]]:
        sealed = self._world.manifests.get(group, {})
        found = sorted((Manifest.unseal(value) for value in sealed.values()), key=precedence)
        return [(signer, manifest, sealed[signer]) for signer, manifest in found]


@dataclass
class FakeScreening:
    """Finds what it is told to, by author's round; remembers what it was asked."""

    found: float | None = None
    asked: list[tuple[UpdateHeader, bytes, float]] = field(default_factory=list)

    async def worse_by(self, header: UpdateHeader, payload: bytes, scale: float) -> float | None:
        self.asked.append((header, payload, scale))
        return self.found


class Peer:
    """A node of the test: everything but the trainer."""

    def __init__(self, world: World, block: int, folder: Path) -> None:
        self.world, self.block = world, block
        identity = ephemeral_identity()
        self.id = identity.peer
        self.client = Client(
            cast(Any, world.clock), world.run, cast(Directory, MemoryDirectory(world, self.id)), identity
        )
        self.groups = world.run.worker_groups(block)
        self.store = VersionStore(world.run, lambda group: folder / group)
        self.sync = Synchroniser(self.client, self.store)
        spool = folder / "spool"
        spool.mkdir(parents=True)
        self.screening = FakeScreening()
        self.collector = Collector(self.client, self.store, self.sync, self.groups, spool, self.screening)
        self.submitter = Submitter(self.client, self.collector, self.sync)
        services = {"round": self.collector.handle, "transfer": self._transfer}
        self.server = LinkServer(identity, world.run, "127.0.0.1", 0, services, self.client.traffic)

    async def start(self) -> None:
        await self.server.start()
        self.announce()

    def announce(self) -> None:
        self.world.records[self.id] = self.announced()

    def announced(self) -> NodeRecord:
        return NodeRecord(
            run=self.world.run.run_id, block=self.block, state="online", host="127.0.0.1",
            port=self.address.port, device="cpu", started=0.0, round=-1,
            **held_fields(self.world.run, self.block, self.store),
            accepted=0, late=0, refused=0, led=0, tokens_per_second=0.0, train_loss=None,
            from_noise_ce=None, bytes_in=0, bytes_out=0, sessions=0, hop_seconds=0.0,
        )  # fmt: skip

    @property
    def address(self) -> HopAddress:
        return HopAddress(peer=self.id, host="127.0.0.1", port=self.server.port or 1)

    async def _transfer(self, link: Any) -> None:
        await serve_transfer(link, self.store)


@pytest.fixture
def world(run: RunSpec) -> World:
    return World(run)
