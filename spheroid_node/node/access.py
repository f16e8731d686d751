"""A way into the swarm: the DHT, the run found in it, and links to its nodes. Daemon and clients share it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from spheroid_node.config import NodeConfig
from spheroid_node.net.dht import Dht
from spheroid_node.net.directory import Directory, find_run
from spheroid_node.net.identity import Identity
from spheroid_node.net.links import Dialler, Link, Traffic
from spheroid_node.net.streams import Streams
from spheroid_node.run import RunSpec
from spheroid_node.wire.messages import HopAddress


@dataclass
class Client:
    """Everything that talking to a run takes."""

    dht: Dht
    run: RunSpec
    directory: Directory
    identity: Identity
    streams: Streams | None = None
    """Where links go over libp2p; without, there is only TCP."""
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._dialler = Dialler(self.identity, self.run.run_id, self.traffic, self.streams)

    async def dial(self, address: HopAddress, service: str) -> Link:
        """A link to a node. Raises LinkFailed."""
        return await self._dialler.dial(address, service)


@asynccontextmanager
async def open_client(
    config: NodeConfig, identity: Identity, *, client_mode: bool, contacts: Path | None = None
) -> AsyncIterator[Client]:
    """Enter the DHT and find the run. Raises the errors of :meth:`Dht.start` and :func:`find_run`."""
    dht = await Dht.start(
        identity,
        config.peers,
        host=config.host,
        port=config.port,
        announce=config.announce,
        announce_port=config.announce_port,
        client_mode=client_mode,
        relay=config.relay and not client_mode,
        contacts=contacts,
    )
    try:
        run = await find_run(dht, config.run)
        yield Client(dht, run, Directory(dht, run), identity, dht.streams)
    finally:
        await dht.stop()
