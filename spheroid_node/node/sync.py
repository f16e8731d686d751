"""Keeping up: the newest version of a group, from whoever holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import structlog

from spheroid_node.errors import TransferFailed
from spheroid_node.model.parameters import elements
from spheroid_node.net.links import LinkFailed
from spheroid_node.net.partial import Partial
from spheroid_node.net.transfer import fetch_version
from spheroid_node.node.access import Client
from spheroid_node.node.clock import sleep_until
from spheroid_node.node.holdings import address_of, holding, shuffled
from spheroid_node.node.lineage import Lineage
from spheroid_node.node.versions import Held, VersionStore, Whole, is_better
from spheroid_node.rounds.lineage import is_within_reach, longest_update
from spheroid_node.rounds.outer import payload_elements
from spheroid_node.rounds.shards import settled
from spheroid_node.rounds.slots import Slots
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import HopAddress, Manifest
from spheroid_node.wire.records import NODE_TTL, NodeRecord
from spheroid_node.wire.tensors import decode_vector

log = structlog.get_logger()

NODES_FRESH_SECONDS = 2.0
FETCH_PERIODS = 4
"""Periods that one fetch may take; what it has brought by then is kept for the next."""


class Synchroniser:
    """Brings the versions of a store up to date. Only one fetch a group runs at a time."""

    def __init__(
        self,
        client: Client,
        store: VersionStore,
        partial: Callable[[str], Path | None] = lambda group: None,
    ) -> None:
        """``partial`` gives the file for what has arrived of a group's version, None to keep it in memory."""
        self._client = client
        self._store = store
        self._partial_file = partial
        self._partials: dict[str, Partial] = {}
        """By group: what fetches that broke off have brought."""
        self._turns: dict[str, asyncio.Lock] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._nodes_read = float("-inf")
        self._nodes_found = float("-inf")
        self._nodes_turn = asyncio.Lock()
        self._lineage = Lineage(client, store, self.nodes)
        self.not_handed_out: set[str] = set()
        """Groups of which there is a better version that nobody gave when last asked."""

    async def nodes(self, fresh: bool = False) -> dict[str, NodeRecord]:
        """Live nodes of all blocks by peer id, read again when the last reading is a few seconds old.

        ``fresh``: read again unless a reading has begun since this was asked for.
        """
        asked = asyncio.get_running_loop().time()
        async with self._nodes_turn:
            now = asyncio.get_running_loop().time()
            if self._nodes_read < asked if fresh else now - self._nodes_read > NODES_FRESH_SECONDS:
                found = await self._client.directory.all_nodes(self._client.run.model.blocks)
                # A DHT that does not answer looks like an empty one: no news for as long as a record lives.
                if found or now - self._nodes_found > NODE_TTL:
                    self._nodes, self._nodes_found = found, now
                self._nodes_read = now
            return self._nodes

    async def sync(self, group: str) -> Held:
        """The newest version of ``group`` that this node can get; what it has where nobody offers more.

        Looks at the announced manifests and, since those expire, at what live nodes say they hold.
        """
        async with self._turns.setdefault(group, asyncio.Lock()):
            self.not_handed_out.discard(group)
            size = elements(self._client.run, group)
            for signer, manifest, sealed in await self._client.directory.manifests(group, size):
                await self._follow(group, signer, manifest, sealed)
            return await self._ask_holders(group, self._store.newest(group))

    async def behind(self, group: str, lag: int) -> Held:
        """The version ``lag`` before the newest here; the nearest to it that is to be had.

        What lies between is fetched too: the next rounds ask for it, and each version names the digest of the
        one before, so that nobody can hand out another.
        """
        async with self._turns.setdefault(group, asyncio.Lock()):
            newer: Held | None = self._store.newest(group)
            for _ in range(lag):
                if newer is None or newer.manifest is None:
                    break
                older = self._store.get(group, newer.version - 1)
                newer = older or await self._fetch_older(group, newer.version - 1, newer.manifest.parent)
        return self._store.behind(group, lag)

    async def line(self, group: str, wanted: Iterable[int]) -> dict[int, Manifest]:
        """As :meth:`Lineage.line`."""
        return await self._lineage.line(group, wanted)

    async def _fetch_older(self, group: str, version: int, digest: bytes) -> Held | None:
        """A version from any node that has it beside a newer one; None where there is none."""
        if version == 0:
            held = await asyncio.to_thread(Held.initial, self._client.run, group)
            self._store.add(held)
            return held
        nodes = await self.nodes()
        for peer, record in shuffled(nodes.items()):
            offer = holding(self._client.run, record, group)
            if offer is not None and offer.version >= version:
                try:
                    return await self._older_from(address_of(peer, record), group, version, digest)
                except (TransferFailed, LinkFailed, WireError, OSError, TimeoutError, ValueError) as error:
                    log.debug("version.not_fetched", group=group, version=version, cause=str(error))
        return None

    async def _older_from(self, address: HopAddress, group: str, version: int, digest: bytes) -> Held:
        """Raises :class:`ValueError` for a holder that has not this version, but perhaps another."""
        listing = await self._lineage.listing(address, group, version)
        if listing is None or not listing.hashes:
            raise ValueError("the holder has it no more")
        signer, manifest = Manifest.unseal(listing.manifest)
        if (manifest.group, manifest.version, manifest.digest) != (group, version, digest):
            raise ValueError("it is not the one that the next was made from")
        if not self._lineage.is_plausible(signer, manifest):
            raise ValueError("its manifest is not plausible")
        held = await self._payload([address], manifest, listing.manifest)
        self._store.add(held)
        self._partials.pop(group).close()
        return held

    async def whole(self, name: str, lag: int = 0) -> Whole | None:
        """A block or the interface ``lag`` versions before the newest that its shards can be put together at.

        The nearest to it that is to be had; None if nobody has shards that belong together.
        """
        groups = self._client.run.shards_of(name)
        await asyncio.gather(*(self.behind(group, lag) for group in groups))
        if len(groups) > 1:
            histories = self._store.histories(name)
            number = settled(history[-1].round for history in histories)
            # Those that are ahead of the others are needed as they were; a round makes one version at most.
            await asyncio.gather(
                *(
                    self.behind(group, lag + max(0, history[-1].round + 1 - number))
                    for group, history in zip(groups, histories, strict=True)
                )
            )
        return self._store.whole_behind(name, lag)

    async def keep_up(self, wholes: tuple[str, ...]) -> None:
        """After every slot, take the versions that it made, whatever the trainer does. For ever.

        A worker fetches them itself when it is ready for them; one whose trainer hangs still serves.
        """
        slots, clock = Slots.of(self._client.run.round), self._client.dht.time
        groups = [group for name in wholes for group in self._client.run.shards_of(name)]
        while True:
            await sleep_until(clock, slots.start(slots.round_at(clock()) + 1))
            await asyncio.gather(*map(self.sync, groups))
            await asyncio.gather(*map(self.whole, wholes))

    async def follow(self, signer: str, sealed: bytes) -> Held:
        """Take a manifest that came directly from its aggregator, if it is better than what is held.

        Raises :class:`WireError` for what is no manifest of a group of this run.
        """
        author, manifest = Manifest.unseal(sealed)
        if manifest.group not in self._client.run.groups:
            raise WireError(ErrorCode.UNEXPECTED, "a manifest of a group that the run does not have")
        async with self._turns.setdefault(manifest.group, asyncio.Lock()):
            if author != signer or not self._lineage.is_plausible(author, manifest):
                return self._store.newest(manifest.group)
            return await self._follow(manifest.group, author, manifest, sealed)

    async def _follow(self, group: str, signer: str, manifest: Manifest, sealed: bytes) -> Held:
        held = self._store.newest(group)
        if not is_better(signer, manifest, held):
            return held
        chain = await self._lineage.believed(signer, manifest)
        if chain is None:
            return held
        holders = await self._holders(group, manifest, first=signer)
        try:
            async with asyncio.timeout(FETCH_PERIODS * self._client.run.round.period):
                fetched = await self._fetch(holders, manifest, sealed, chain)
            self._lineage.kept_to_by(signer)
            return fetched
        except (TransferFailed, WireError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            self.not_handed_out.add(group)
            self._lineage.let_down_by(signer)
            log.warning("version.not_fetched", group=group, version=manifest.version, cause=str(error))
            return held

    async def _payload(self, holders: list[HopAddress], manifest: Manifest, sealed: bytes) -> Held:
        data, _ = await fetch_version(
            holders,
            manifest.group,
            manifest.version,
            manifest.digest,
            4 * payload_elements(self._client.run.training, manifest.elements),
            lambda address: self._client.dial(address, "transfer"),
            partial=await self._partial(manifest),
        )
        payload = decode_vector(data, "float32")
        payload.setflags(write=False)
        if not np.isfinite(payload).all():
            raise ValueError("its parameters are not finite")
        return await asyncio.to_thread(Held.of, manifest.group, manifest.version, payload, sealed)

    async def _partial(self, manifest: Manifest) -> Partial:
        """What earlier attempts at this version have brought; what they brought of another one goes."""
        group = manifest.group
        size = 4 * payload_elements(self._client.run.training, manifest.elements)
        kept = self._partials.get(group)
        if kept is None or (kept.digest, len(kept.payload)) != (manifest.digest, size):
            if kept is not None:
                kept.close()
            file = self._partial_file(group)
            if file is None:
                kept = Partial(manifest.digest, size)
            else:
                kept = await asyncio.to_thread(Partial.resume, manifest.digest, size, file)
            self._partials[group] = kept
        return kept

    async def _fetch(
        self, holders: list[HopAddress], manifest: Manifest, sealed: bytes, chain: list[Manifest]
    ) -> Held:
        held = await self._payload(holders, manifest, sealed)
        if not await asyncio.to_thread(self._is_within_reach, held, chain):
            raise ValueError("it is further from its parent than the updates in it can reach")
        adopted = await asyncio.to_thread(self._store.adopt, held)
        self._partials.pop(manifest.group).close()
        if adopted is not held:
            return self._store.newest(manifest.group)
        log.info(
            "round.version",
            round=manifest.round,
            group=manifest.group,
            version=manifest.version,
            digest=manifest.digest.hex(),
            total=manifest.total,
        )
        return held

    def _is_within_reach(self, held: Held, chain: list[Manifest]) -> bool:
        """Whether the updates of ``chain`` can lead here; taken for granted where its beginning is gone."""
        run, base = self._client.run, None
        if chain:
            base = self._store.get(held.group, chain[0].version - 1)
        if base is None or base.digest != chain[0].parent:
            return True
        longest = [longest_update(manifest, run) for manifest in chain]
        return is_within_reach(run.training, base.payload, held.payload, held.elements, longest)

    async def _ask_holders(self, group: str, held: Held) -> Held:
        """Manifests expire when a swarm sleeps; a holder still has its own, signed."""
        nodes = await self.nodes()
        for peer, record in shuffled(nodes.items()):
            offer = holding(self._client.run, record, group)
            if offer is None or offer.version <= held.version:
                continue
            try:
                listing = await self._lineage.listing(address_of(peer, record), group, offer.version)
                if listing is not None:
                    signer, manifest = Manifest.unseal(listing.manifest)
                    if manifest.group == group and self._lineage.is_plausible(signer, manifest):
                        held = await self._follow(group, signer, manifest, listing.manifest)
            except (LinkFailed, WireError, OSError, TimeoutError) as error:
                log.debug("version.not_listed", group=group, cause=str(error))
        return held

    async def _holders(self, group: str, manifest: Manifest, first: str) -> list[HopAddress]:
        """Who has the version: its aggregator and every node that says so, in an order of chance.

        Else all that come at the same time would ask the same ones.
        """
        nodes = await self.nodes(fresh=first not in self._nodes)
        named = [
            address_of(peer, record)
            for peer, record in nodes.items()
            if peer == first
            or ((held := holding(self._client.run, record, group)) is not None and held.is_of(manifest))
        ]
        return shuffled(address for address in named if address.peer != self._client.identity.peer)
