"""Which nodes may follow this one in a chain, and how far they are."""

from __future__ import annotations

import asyncio
import random

import structlog

from spheroid_node.net.distance import measure_distances
from spheroid_node.node.access import Client
from spheroid_node.node.holdings import address_of
from spheroid_node.node.report import Report
from spheroid_node.wire.records import MAX_NEIGHBOURS, Neighbour

log = structlog.get_logger()

PERIOD = 60.0
FIRST = 5.0
"""Seconds after the start at which the others are looked at first."""
SMOOTHING = 0.3
NOTABLE = 0.2
"""A change of so much, relative to what was published, is published at once."""


class Neighbours:
    """Measures the replicas of the next block; at the last block those of block 0, which reads results."""

    def __init__(self, client: Client, report: Report) -> None:
        self._client, self._report = client, report
        self._seconds: dict[str, float] = {}

    async def run(self) -> None:
        """For ever."""
        await asyncio.sleep(FIRST)
        while True:
            try:
                await self.measure()
            except OSError as error:
                log.debug("neighbours.unknown", cause=str(error))
            await asyncio.sleep(PERIOD * random.uniform(0.8, 1.2))

    async def measure(self) -> None:
        """Once, of at most as many as a record has room for."""
        blocks = self._client.run.model.blocks
        records = await self._client.directory.nodes((self._report.block + 1) % blocks)
        own = self._client.identity.peer
        addresses = [address_of(peer, record) for peer, record in records.items() if peer != own]
        chosen = random.sample(addresses, min(len(addresses), MAX_NEIGHBOURS))
        for peer, seconds in (await measure_distances(chosen)).items():
            before = self._seconds.get(peer, seconds)
            self._seconds[peer] = before + SMOOTHING * (seconds - before)
        self._seconds = {peer: seconds for peer, seconds in self._seconds.items() if peer in records}
        self._tell()

    def _tell(self) -> None:
        nearest = sorted(self._seconds.items(), key=lambda item: item[1])[:MAX_NEIGHBOURS]
        before = {neighbour.peer: neighbour.seconds for neighbour in self._report.neighbours}
        if any(abs(seconds - before.get(peer, 0.0)) > NOTABLE * seconds for peer, seconds in nearest):
            self._report.neighbours = [Neighbour(peer=peer, seconds=seconds) for peer, seconds in nearest]
            self._report.touch()
