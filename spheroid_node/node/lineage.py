"""Where a version comes from: the manifests that lead to it, asked of whoever remembers them.

Anyone can sign a manifest. One is believed if a replica of its group stands behind it, and if it was made
from what is known here: each names the digest of its parent. Over a gap that nobody's manifests bridge, as
for one who comes late, what at least half of the replicas hold is believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import NamedTuple, Protocol

import structlog

from spheroid_node.model.parameters import elements
from spheroid_node.net.links import LinkFailed
from spheroid_node.node.access import Client
from spheroid_node.node.history import LENGTH
from spheroid_node.node.holdings import address_of, holding, owns, shuffled
from spheroid_node.node.versions import Held, VersionStore
from spheroid_node.rounds.forks import is_plausible
from spheroid_node.rounds.lineage import follows
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import HopAddress, Listing, Manifest, Want
from spheroid_node.wire.records import NodeRecord

log = structlog.get_logger()

LISTING_SECONDS = 10.0
DOUBT_SECONDS = 5.0
"""For so long a manifest that was not believed is not looked into again."""
FORGIVEN = 2
"""Times in a row that a signer's version may not be had."""
LONGEST_BACK_OFF = 64
"""Periods."""
LOOK_SECONDS = 2.0
"""Between readings of the records for the sake of an unknown signer."""
REMEMBERED = 256
"""Manifests that were not believed, so that each is told once."""
BEHIND = 3
"""Versions by which a replica's record may be behind what it holds."""


class Nodes(Protocol):
    def __call__(self, fresh: bool = False) -> Awaitable[dict[str, NodeRecord]]: ...


class Doubted(Exception):
    """Why a manifest is not followed."""


class LetDown(NamedTuple):
    times: int
    until: float
    """When the next version of this signer is asked for, unless others hold it."""


class Lineage:
    """Of all groups of a store; ``nodes`` reads the records of the swarm."""

    def __init__(self, client: Client, store: VersionStore, nodes: Nodes) -> None:
        self._client = client
        self._store = store
        self._nodes = nodes
        self._first: dict[str, bytes] = {}
        """Digest of version 0 of a group."""
        self._doubted: dict[tuple[str, bytes], float] = {}
        """By signer and digest of manifests that were not believed: until when nobody is asked again. What is
        false by one signer may be true by another."""
        self._looked = float("-inf")
        """When the records were last read anew for an unknown signer: many can be made up."""
        self._let_down: dict[str, LetDown] = {}
        """By signer of a version that nobody handed out."""

    # --- the line that is followed ----------------------------------------------------------------

    async def line(self, group: str, wanted: Iterable[int]) -> dict[int, Manifest]:
        """The manifests of the versions that are here, and of those back to the ``wanted`` that others have.

        One that the version after it was not made from is none of them: this node may have followed a fork
        and missed what the others made instead, so the versions in between are asked for as well.
        """
        line = self._store.line(group)
        newest = max(line, default=0)
        oldest = max(min(wanted, default=newest), newest - LENGTH)
        for version in range(newest - 1, oldest - 1, -1):
            known, after = line.get(version), line.get(version + 1)
            if known is None or (after is not None and after.parent != known.digest):
                line.pop(version, None)
                manifest = await self.manifest(group, version, after)
                if manifest is not None:
                    line[version] = manifest
        return line

    async def manifest(
        self, group: str, version: int, after: Manifest | None, maker: str = ""
    ) -> Manifest | None:
        """Of an older version, from any node that remembers it: what the one ``after`` it was made from.

        Anyone can sign another for the same parameters, so one that does not fit is passed over. The
        ``maker`` of a later version is asked first, as its record may not tell of that yet.
        """
        nodes = await self._nodes()
        others = [
            peer
            for peer, record in nodes.items()
            if (offer := holding(self._client.run, record, group)) is not None and offer.version >= version
        ]
        first = [maker] if maker in nodes else []
        for peer in dict.fromkeys([*first, *shuffled(others)]):
            try:
                listing = await self.listing(address_of(peer, nodes[peer]), group, version)
                if listing is not None:
                    signer, manifest = Manifest.unseal(listing.manifest)
                    is_it = (manifest.group, manifest.version) == (group, version)
                    fits = after is None or follows(after, manifest, self._client.run)
                    if is_it and fits and self.is_plausible(signer, manifest):
                        return manifest
            except (LinkFailed, WireError, OSError, TimeoutError) as error:
                log.debug("version.not_listed", group=group, version=version, cause=str(error))
        return None

    async def listing(self, address: HopAddress, group: str, version: int) -> Listing | None:
        """What a node says of a version; None where it has none. Raises as links do."""
        link = await self._client.dial(address, "transfer")
        try:
            await link.send(Want(group=group, version=version))
            reply = await link.receive(timeout=LISTING_SECONDS)
            return reply if isinstance(reply, Listing) else None
        finally:
            await link.close()

    # --- what to believe --------------------------------------------------------------------------

    def is_plausible(self, signer: str, manifest: Manifest) -> bool:
        """Whether it can be true at all, before anybody is asked."""
        run = self._client.run
        if manifest.group not in run.groups or not run.allows(signer):
            return False
        return is_plausible(manifest, run, elements(run, manifest.group), self._client.dht.time())

    async def believed(self, signer: str, manifest: Manifest) -> list[Manifest] | None:
        """The manifests that lead to this one from a version that is followed here, oldest first.

        Empty where nothing does and the replicas vouch for it; None if it is not believed (told once).
        """
        now, named = asyncio.get_running_loop().time(), (signer, manifest.digest)
        if now < self._doubted.get(named, now):
            return None
        try:
            return await self._examined(signer, manifest)
        except Doubted as doubt:
            if named not in self._doubted:
                log.warning(
                    "version.not_believed",
                    group=manifest.group,
                    version=manifest.version,
                    signer=signer,
                    cause=str(doubt),
                )
            newest = list(self._doubted.items())[1 - REMEMBERED :]
            self._doubted = {**dict(newest), named: now + DOUBT_SECONDS}
            return None

    def let_down_by(self, signer: str) -> None:
        """Its version was not to be had, or nothing led to it. It may have died: twice that is nothing.

        After that its next ones are left to others to take first, for longer each time.
        """
        now, period = asyncio.get_running_loop().time(), self._client.run.round.period
        times = self._let_down.get(signer, LetDown(0, now)).times + 1
        periods = min(2 ** (times - FORGIVEN), LONGEST_BACK_OFF) if times > FORGIVEN else 0
        self._let_down[signer] = LetDown(times, now + periods * period)

    def _is_in_back_off(self, signer: str) -> bool:
        let_down = self._let_down.get(signer)
        return let_down is not None and asyncio.get_running_loop().time() < let_down.until

    def kept_to_by(self, signer: str) -> None:
        """It announced a version that could be had."""
        self._let_down.pop(signer, None)

    async def _examined(self, signer: str, manifest: Manifest) -> list[Manifest]:
        owners = await self._owners(manifest.group, signer)
        is_held = any(self._holds_one_of(record, [manifest]) for record in owners.values())
        if not is_held and self._is_in_back_off(signer):
            raise Doubted("its signer announced versions before that were not to be had")
        if not is_held and signer not in owners and signer != self._client.identity.peer:
            raise Doubted("nobody who signed or holds it owns a replica of its group")
        chain, is_linked = await self._chain(signer, manifest)
        if is_linked:
            return chain[::-1]
        if not self._is_vouched_for(chain, owners):
            self.let_down_by(signer)  # to look for what leads to it takes time
            raise Doubted("nothing leads to it from what is known here, and most replicas hold another")
        return []

    async def _owners(self, group: str, signer: str) -> dict[str, NodeRecord]:
        """Of other nodes: those that take part in the rounds of a group, by peer id."""
        nodes, now = await self._nodes(), asyncio.get_running_loop().time()
        if signer not in nodes and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            nodes = await self._nodes(fresh=True)
        own = self._client.identity.peer
        return {peer: record for peer, record in nodes.items() if owns(record, group) and peer != own}

    async def _chain(self, signer: str, manifest: Manifest) -> tuple[list[Manifest], bool]:
        """This manifest and those before it, and whether they lead to a version that is followed here."""
        group, chain = manifest.group, [manifest]
        line, newest = self._store.line(group), self._store.newest(group).version
        for _ in range(LENGTH if manifest.version <= newest + LENGTH else BEHIND):
            child = chain[-1]
            if child.version == 1:
                self._check(child, None)
                return chain, child.parent == await self._digest_of_first(group)
            known = line.get(child.version - 1)
            is_known = known is not None and known.digest == child.parent
            if is_known:
                parent = known
            else:
                parent = await self.manifest(group, child.version - 1, child, signer)
            if parent is None:
                break
            self._check(child, parent)
            if is_known:
                return chain, True
            chain.append(parent)
        return chain, False

    def _check(self, child: Manifest, parent: Manifest | None) -> None:
        if not follows(child, parent, self._client.run):
            raise Doubted(f"version {child.version} cannot have been made from its parent")

    async def _digest_of_first(self, group: str) -> bytes:
        if group not in self._first:
            first = self._store.get(group, 0)
            if first is None:
                first = await asyncio.to_thread(Held.initial, self._client.run, group)
            self._first[group] = first.digest
        return self._first[group]

    def _is_vouched_for(self, chain: list[Manifest], owners: dict[str, NodeRecord]) -> bool:
        """By at least as many other replicas as hold something else; their records are a little behind."""
        stands = [self._holds_one_of(record, chain) for record in owners.values()]
        return sum(stands) >= max(1, len(stands) - sum(stands))

    def _holds_one_of(self, record: NodeRecord, chain: list[Manifest]) -> bool:
        held = holding(self._client.run, record, chain[0].group)
        return held is not None and any(held.is_of(manifest) for manifest in chain)
