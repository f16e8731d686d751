"""What the swarm looks like at one moment, read from its records: the source of status and of live views."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from spheroid_node.node.holdings import holding, owns
from spheroid_node.rounds.shards import settled
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest
from spheroid_node.wire.records import NodeRecord
from spheroid_node.wire.tensors import digest_of_hashes

if TYPE_CHECKING:
    from spheroid_node.net.directory import Directory

READ_TIMEOUT = 20.0
"""Seconds after which a DHT that does not answer counts as empty for this snapshot."""


@dataclass(frozen=True)
class Replica:
    """One node, as it describes itself."""

    peer: str
    block: int
    state: str
    host: str
    device: str
    seconds_up: float
    round: int
    version: int
    interface_version: int
    accepted: int
    late: int
    refused: int
    led: int
    tokens_per_second: float
    train_loss: float | None
    from_noise_ce: float | None
    bytes_in: int
    bytes_out: int
    sessions: int
    hop_seconds: float
    note: str


@dataclass(frozen=True)
class GroupVersion:
    """The newest announced version of a block or of the interface."""

    group: str
    version: int
    round: int
    steps: int
    accepted: int
    others: int
    """Updates of that round that were late or refused."""
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment of DHT time. Replicas are sorted by block, then peer id."""

    run: RunSpec
    time: float
    round: int
    seconds_to_deadline: float
    """Negative in the settling part of a slot."""
    replicas: tuple[Replica, ...]
    versions: Mapping[str, GroupVersion]

    def of_block(self, block: int) -> tuple[Replica, ...]:
        return tuple(replica for replica in self.replicas if replica.block == block)

    @property
    def missing(self) -> tuple[int, ...]:
        """Blocks that no live replica holds: without them nobody can be answered."""
        held = {replica.block for replica in self.replicas}
        return tuple(block for block in range(self.run.model.blocks) if block not in held)

    @property
    def from_noise_ce(self) -> float | None:
        """Nats a byte after the last block: the mean of what its replicas measured."""
        measured = [
            replica.from_noise_ce
            for replica in self.of_block(self.run.model.blocks - 1)
            if replica.from_noise_ce is not None
        ]
        return fmean(measured) if measured else None

    def total(self, field: str) -> float:
        """Sum of a numeric field over all replicas, e.g. ``bytes_in``."""
        return float(sum(getattr(replica, field) for replica in self.replicas))

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``."""
        return {
            "run": self.run.run_id,
            "name": self.run.name,
            "blocks": self.run.model.blocks,
            "time": self.time,
            "round": self.round,
            "seconds_to_deadline": self.seconds_to_deadline,
            "from_noise_ce": self.from_noise_ce,
            "blocks_without_replica": list(self.missing),
            "versions": {group: asdict(version) for group, version in self.versions.items()},
            "replicas": [asdict(replica) for replica in self.replicas],
        }


class Curve:
    """From-noise CE after each round, from one snapshot after the other.

    A record names the newest round that its node took part in, and the CE measured after that round or, until
    the node gets round to measuring, after the one before. So a CE counts only once it has changed.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._by_round: dict[int, dict[str, float]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Take what the replicas of the last block have measured since the snapshot before."""
        for replica in snapshot.of_block(snapshot.run.model.blocks - 1):
            ce = replica.from_noise_ce
            if ce is not None and replica.round >= 0 and ce != self._seen.get(replica.peer):
                self._by_round.setdefault(replica.round, {})[replica.peer] = ce
            if ce is not None:
                self._seen[replica.peer] = ce

    def by_round(self) -> dict[int, float]:
        """Round → nats a byte, the mean of the replicas, in the order of the rounds."""
        return {number: fmean(self._by_round[number].values()) for number in sorted(self._by_round)}


def snapshot_of(
    run: RunSpec, now: float, records: Mapping[str, NodeRecord], manifests: Mapping[str, Manifest]
) -> Snapshot:
    """Put a snapshot together from node records by peer id and the newest manifests by group."""
    slots = Slots.of(run.round)
    number = slots.round_at(now)
    return Snapshot(
        run=run,
        time=now,
        round=number,
        seconds_to_deadline=slots.deadline(number) - now,
        replicas=tuple(
            sorted(
                (_replica(peer, record, now) for peer, record in records.items()),
                key=lambda replica: (replica.block, replica.peer),
            )
        ),
        versions={
            whole: _version(whole, [manifests[group] for group in run.shards_of(whole)])
            for whole in run.wholes
            if manifests.keys() >= set(run.shards_of(whole))
        },
    )


async def collect(directory: Directory, run: RunSpec, now: float) -> Snapshot:
    """Read the records of all blocks and the manifests of all groups; what does not answer is left out."""
    nodes, *manifests = await asyncio.gather(
        _or_none(directory.all_nodes(run.model.blocks)),
        *(_or_none(directory.manifests(group)) for group in run.groups),
    )
    nodes = nodes or {}
    newest = {
        group: manifest
        for group, found in zip(run.groups, manifests, strict=True)
        if (manifest := _newest(run, group, found or [], nodes)) is not None
    }
    return snapshot_of(run, now, nodes, newest)


def _newest(
    run: RunSpec, group: str, announced: list[tuple[str, Manifest, bytes]], nodes: Mapping[str, NodeRecord]
) -> Manifest | None:
    """The best manifest that a replica signed or holds; any at all where there are no replicas."""
    owners = {peer: record for peer, record in nodes.items() if owns(record, group)}
    for signer, manifest, _ in announced:
        held = (holding(run, record, group) for record in owners.values())
        if not owners or signer in owners or any(one is not None and one.is_of(manifest) for one in held):
            return manifest
    return None


async def _or_none(reading: Any) -> Any:
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            return await reading
    except TimeoutError:
        return None


def _replica(peer: str, record: NodeRecord, now: float) -> Replica:
    held = {version.group: version.version for version in record.held}
    return Replica(
        peer=peer,
        block=record.block,
        state=record.state,
        host=record.host,
        device=record.device,
        seconds_up=max(0.0, now - record.started),
        round=record.round,
        version=held.get(block_group(record.block), 0),
        interface_version=held.get(INTERFACE_GROUP, 0),
        accepted=record.accepted,
        late=record.late,
        refused=record.refused,
        led=record.led,
        tokens_per_second=record.tokens_per_second,
        train_loss=record.train_loss,
        from_noise_ce=record.from_noise_ce,
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
        sessions=record.sessions,
        hop_seconds=record.hop_seconds,
        note=record.note,
    )


def _version(whole: str, manifests: Sequence[Manifest]) -> GroupVersion:
    """Of a block or the interface, from the manifests of its shards: what all of them have got to."""
    first, digests = manifests[0], [manifest.digest for manifest in manifests]
    sharded = len(manifests) > 1
    return GroupVersion(
        group=whole,
        version=settled(manifest.round for manifest in manifests) if sharded else first.version,
        round=min(manifest.round for manifest in manifests),
        steps=min(manifest.steps for manifest in manifests),
        accepted=min(manifest.accepted for manifest in manifests),
        others=max(_others(manifest) for manifest in manifests),
        digest=(digest_of_hashes(digests) if sharded else first.digest).hex(),
    )


def _others(manifest: Manifest) -> int:
    return sum(update.verdict is not Verdict.ACCEPTED for update in manifest.updates)
