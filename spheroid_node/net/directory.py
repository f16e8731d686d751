"""What a swarm says about itself in the DHT: who owns which block, the newest manifests, the run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from spheroid_node.errors import RunNotFound, SeveralRuns
from spheroid_node.rounds.forks import is_plausible, precedence
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import Manifest
from spheroid_node.wire.records import (
    NODE_TTL,
    RUN_TTL,
    NodeRecord,
    RunAdvert,
    manifest_ttl,
    manifests_key,
    nodes_key,
    run_key,
    runs_key,
)

if TYPE_CHECKING:
    from spheroid_node.net.dht import Dht

log = structlog.get_logger()

FIND_RUN_ATTEMPTS = 3
FIND_RUN_PAUSE = 1.0


class Directory:
    """The records of one run. Everything read is checked; what does not hold is left out."""

    def __init__(self, dht: Dht, run: RunSpec) -> None:
        self.dht = dht
        self.run = run
        self.run_id = run.run_id

    async def publish_node(self, record: NodeRecord) -> bool:
        """Publish what this node says about itself, for NODE_TTL seconds."""
        return await self.dht.put(nodes_key(self.run_id, record.block), record.pack(), NODE_TTL)

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        """Records of the peers that own a replica of ``block``.

        Without those that are leaving, and those that the run does not allow to own one.
        """
        found = await self.dht.get(nodes_key(self.run_id, block))
        records = {}
        for peer, value in found.items():
            record = self._node_record(peer, value)
            if record is None or not self.run.allows(peer):
                continue
            if record.block == block and record.state != "leaving":
                records[peer] = record
        return records

    async def all_nodes(self, blocks: int) -> dict[str, NodeRecord]:
        """Records of all blocks. A peer that has moved counts where it started last."""
        by_block = await asyncio.gather(*(self.nodes(block) for block in range(blocks)))
        newest: dict[str, NodeRecord] = {}
        for records in by_block:
            for peer, record in records.items():
                if peer not in newest or record.started > newest[peer].started:
                    newest[peer] = record
        return newest

    async def publish_manifest(self, group: str, sealed: bytes) -> bool:
        """Publish a sealed manifest of our own."""
        ttl = manifest_ttl(self.run.round.period)
        return await self.dht.put(manifests_key(self.run_id, group), sealed, ttl)

    async def manifests(self, group: str, elements: int | None = None) -> list[tuple[str, Manifest, bytes]]:
        """Signer, manifest and sealed bytes of what was announced as versions of a group, the best first.

        Left out are manifests that their signer did not publish, of peers that the run does not allow, and
        such as cannot be true by now (``elements``: the parameters of the group, when known).
        """
        found = await self.dht.get(manifests_key(self.run_id, group))
        sealed = {peer: value for peer, value in found.items() if self.run.allows(peer)}
        signed = []
        for peer, value in sealed.items():
            manifest = self._manifest(peer, value)
            if (
                manifest is not None
                and manifest.group == group
                and is_plausible(manifest, self.run, elements or manifest.elements, self.dht.time())
            ):
                signed.append((peer, manifest))
        return [(peer, manifest, sealed[peer]) for peer, manifest in sorted(signed, key=precedence)]

    async def publish_run(self) -> bool:
        """Publish the run itself; whoever lists it holds it, so the specification goes first."""
        advert = RunAdvert(run=self.run_id, name=self.run.name)
        return await self.dht.put(run_key(self.run_id), self.run.pack(), RUN_TTL) and await self.dht.put(
            runs_key(), advert.pack(), RUN_TTL
        )

    def _node_record(self, peer: str, value: bytes) -> NodeRecord | None:
        try:
            record = NodeRecord.unpack(value)
        except WireError as error:
            log.debug("directory.bad_record", peer=peer, cause=str(error))
            return None
        return record if record.run == self.run_id else None

    def _manifest(self, peer: str, value: bytes) -> Manifest | None:
        try:
            signer, manifest = Manifest.unseal(value)
        except WireError as error:
            log.debug("directory.bad_manifest", peer=peer, cause=str(error))
            return None
        return manifest if signer == peer else None


async def find_run(dht: Dht, run_id: str | None = None) -> RunSpec:
    """The run named ``run_id``, or the only one that is published. From then on the DHT knows its keys.

    Raises :class:`RunNotFound` and :class:`SeveralRuns`.
    """
    for attempt in range(FIND_RUN_ATTEMPTS):
        if attempt:  # a bootstrap that has just started may not have published yet
            await asyncio.sleep(FIND_RUN_PAUSE)
        wanted = run_id or await _only_run(dht)
        if wanted is None:
            continue
        dht.keys.look_for(wanted)
        for packed in (await dht.get(run_key(wanted))).values():
            try:
                run = RunSpec.unpack(packed)
            except ValueError:
                continue
            if run.run_id == wanted:
                dht.keys.know(run)
                return run
    raise RunNotFound(run_id)


async def _only_run(dht: Dht) -> str | None:
    runs = set()
    for value in (await dht.get(runs_key())).values():
        try:
            runs.add(RunAdvert.unpack(value).run)
        except WireError:
            continue
    if len(runs) > 1:
        raise SeveralRuns(sorted(runs))
    return next(iter(runs), None)
