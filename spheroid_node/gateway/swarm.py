"""What the gateway asks of a swarm, and the swarm that a client has entered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

from spheroid_node.node.client import Client, chain_finder
from spheroid_node.node.snapshot import Curve, Snapshot, collect
from spheroid_node.run import RunSpec
from spheroid_node.serving.finding import ChainSource
from spheroid_node.serving.remote import Generation

PATIENCE = 30.0
"""Seconds that a completion waits for another chain."""

SNAPSHOT_SECONDS = 2.0
"""How old a snapshot may be: many who look at the page are one reader of the DHT."""


@dataclass(frozen=True)
class View:
    """The swarm at one moment, and its curve since the gateway looks."""

    snapshot: Snapshot
    ce_by_round: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        return self.snapshot.as_json() | {"ce_by_round": [*self.ce_by_round.items()]}


class TextSource(ChainSource[Any], Protocol):
    """Chains that serve one set of versions."""

    @property
    def versions(self) -> object:
        """As text: what the chains serve, known once one is open."""
        ...


class Swarm(Protocol):
    """Where texts and views come from."""

    @property
    def run(self) -> RunSpec: ...

    def source(self, generation: Generation) -> TextSource:
        """Where the chains of one text come from."""
        ...

    async def view(self) -> View: ...


class ClientSwarm:
    """The swarm behind ``client``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._curve = Curve()
        self._view: View | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    @property
    def run(self) -> RunSpec:
        return self._client.run

    def source(self, generation: Generation) -> TextSource:
        return chain_finder(self._client, generation, PATIENCE)

    async def view(self) -> View:
        client = self._client
        async with self._reading:
            if self._view is None or time.monotonic() - self._read_at > SNAPSHOT_SECONDS:
                snapshot = await collect(client.directory, client.run, client.dht.time())
                self._curve.add(snapshot)
                self._view = View(snapshot, self._curve.by_round())
                self._read_at = time.monotonic()
            return self._view
