"""What a node says about itself: its record in the DHT, its log and its metrics are made of this."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from spheroid_node.errors import IdentityCopied
from spheroid_node.node.access import Client
from spheroid_node.node.holdings import held_fields
from spheroid_node.node.versions import VersionStore
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import HopAddress
from spheroid_node.wire.records import NODE_TTL, Neighbour, NodeRecord

log = structlog.get_logger()

RENEW_SECONDS = NODE_TTL / 3
SHORTEST_SECONDS = 0.5
"""Changes that come closer together than this are published as one."""


@dataclass
class Report:
    """Filled in by the parts of a node, published by :class:`Reporter`."""

    block: int
    device: str
    state: str = "joining"
    round: int = -1
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    tokens_per_second: float = 0.0
    train_loss: float | None = None
    from_noise_ce: float | None = None
    sessions: int = 0
    hop_seconds: float = 0.0
    led: int = 0
    neighbours: list[Neighbour] = field(default_factory=list)
    note: str = ""
    """What its work says: the newest thing its owner should know."""
    machine: dict[str, str] = field(default_factory=dict)
    """What is wrong with the machine, by what it is."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def touch(self) -> None:
        """Something is new: publish soon rather than at the next renewal."""
        self.changed.set()

    def of_machine(self, **notes: str) -> None:
        """What is wrong with parts of the machine; empty: they are well again."""
        before = dict(self.machine)
        self.machine = {part: note for part, note in (self.machine | notes).items() if note}
        if self.machine != before:
            self.touch()

    @property
    def all_notes(self) -> str:
        return "; ".join([*self.machine.values(), *filter(None, [self.note])])


class Reporter:
    """Publishes a node's record for as long as it lives."""

    def __init__(self, client: Client, store: VersionStore, report: Report, address: HopAddress) -> None:
        self._client = client
        self._store = store
        self._report = report
        self.address = address
        self._started = client.dht.time()
        self._published = False
        self._foreign: tuple[float, float] | None = None
        """When a record of an older node was first and last seen under our key."""

    def record(self) -> NodeRecord:
        report, traffic = self._report, self._client.traffic
        run = self._client.run
        return NodeRecord.parse(
            {
                "run": run.run_id,
                "block": report.block,
                "state": report.state,
                "host": self.address.host,
                "port": self.address.port,
                "device": report.device,
                "started": self._started,
                "round": report.round,
                **held_fields(run, report.block, self._store),
                "accepted": report.verdicts[Verdict.ACCEPTED],
                "late": report.verdicts[Verdict.LATE],
                "refused": report.verdicts[Verdict.REFUSED],
                "led": report.led,
                "tokens_per_second": report.tokens_per_second,
                "train_loss": report.train_loss,
                "from_noise_ce": report.from_noise_ce,
                "bytes_in": traffic.received,
                "bytes_out": traffic.sent,
                "sessions": report.sessions,
                "hop_seconds": report.hop_seconds,
                "neighbours": report.neighbours,
                "note": report.all_notes[:200],
            }
        )

    def move_to(self, address: HopAddress) -> None:
        """Others dial this machine there from now on."""
        if address != self.address:
            log.info("node.address", host=address.host, port=address.port)
            self.address = address
            self._report.touch()

    async def publish(self) -> None:
        self._published = True
        await self._client.directory.publish_node(self.record())

    async def run(self) -> None:
        """Publish at every change and renew in between, for ever.

        Raises :class:`IdentityCopied` when another live node publishes under this node's key.
        """
        while True:
            self._report.changed.clear()
            await self._check_copy()
            await self.publish()
            await asyncio.sleep(SHORTEST_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._report.changed.wait()

    async def leave(self) -> None:
        """Say goodbye, so that nobody waits for this node's updates until its record expires."""
        self._report.state = "leaving"
        await self.publish()

    async def _check_copy(self) -> None:
        """Of two nodes with one key the one that started later gives way.

        Looked for before every publication, when what stands there is ours from the last time, or what the
        other has published since. A record of our own earlier life is not renewed, and so is gone in time.
        """
        if not self._published:
            return
        directory, blocks = self._client.directory, range(self._client.run.model.blocks)
        of_blocks = await asyncio.gather(*map(directory.nodes, blocks))
        found = [
            nodes[self._client.identity.peer] for nodes in of_blocks if self._client.identity.peer in nodes
        ]
        if all(record.started >= self._started for record in found):
            return
        now = self._client.dht.time()
        first, last = self._foreign or (now, now)
        self._foreign = (now if now - last > NODE_TTL else first, now)
        if now - self._foreign[0] > NODE_TTL:
            raise IdentityCopied(str(self._client.identity.path), self._client.identity.peer)
