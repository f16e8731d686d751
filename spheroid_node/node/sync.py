"""Keeping up: the newest version of a group, from whoever holds it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog

from spheroid_node.errors import TransferFailed
from spheroid_node.model.parameters import elements
from spheroid_node.net.links import LinkFailed
from spheroid_node.net.partial import Partial
from spheroid_node.net.transfer import fetch_version
from spheroid_node.node.access import Client
from spheroid_node.node.clock import sleep_until
from spheroid_node.node.history import LENGTH
from spheroid_node.node.holdings import holding
from spheroid_node.node.versions import Held, VersionStore, Whole, is_better
from spheroid_node.rounds.forks import is_plausible
from spheroid_node.rounds.outer import payload_elements
from spheroid_node.rounds.shards import settled
from spheroid_node.rounds.slots import Slots
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import HopAddress, Listing, Manifest, Want
from spheroid_node.wire.records import NODE_TTL, NodeRecord
from spheroid_node.wire.tensors import decode_vector

log = structlog.get_logger()

T = TypeVar("T")

NODES_FRESH_SECONDS = 2.0
LISTING_SECONDS = 10.0


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
            held = self._store.newest(group)
            announced = await self._client.directory.newest_manifest(group, elements(self._client.run, group))
            if announced is not None:
                signer, manifest, sealed = announced
                held = await self._follow(group, signer, manifest, sealed)
            return await self._ask_holders(group, held)

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
                manifest = await self._manifest(group, version, after.parent if after else None)
                if manifest is not None:
                    line[version] = manifest
        return line

    async def _manifest(self, group: str, version: int, digest: bytes | None) -> Manifest | None:
        """Of an older version, the one of that digest where it is known, from any node that remembers it."""
        nodes = await self.nodes()
        for record in shuffled(nodes.values()):
            offer = holding(self._client.run, record, group)
            if offer is None or offer.version < version:
                continue
            try:
                listing = await self._listing(_address(nodes, record), group, version)
                if listing is not None:
                    signer, manifest = Manifest.unseal(listing.manifest)
                    is_it = (manifest.group, manifest.version) == (group, version)
                    is_it = is_it and digest in (None, manifest.digest)
                    if is_it and self._is_plausible(signer, manifest):
                        return manifest
            except (LinkFailed, WireError, OSError, TimeoutError) as error:
                log.debug("version.not_listed", group=group, version=version, cause=str(error))
        return None

    async def _fetch_older(self, group: str, version: int, digest: bytes) -> Held | None:
        """A version from any node that has it beside a newer one; None where there is none."""
        if version == 0:
            held = await asyncio.to_thread(Held.initial, self._client.run, group)
            self._store.add(held)
            return held
        nodes = await self.nodes()
        for record in shuffled(nodes.values()):
            offer = holding(self._client.run, record, group)
            if offer is not None and offer.version >= version:
                try:
                    return await self._older_from(_address(nodes, record), group, version, digest)
                except (TransferFailed, LinkFailed, WireError, OSError, TimeoutError, ValueError) as error:
                    log.debug("version.not_fetched", group=group, version=version, cause=str(error))
        return None

    async def _older_from(self, address: HopAddress, group: str, version: int, digest: bytes) -> Held:
        """Raises :class:`ValueError` for a holder that has not this version, but perhaps another."""
        listing = await self._listing(address, group, version)
        if listing is None or not listing.hashes:
            raise ValueError("the holder has it no more")
        signer, manifest = Manifest.unseal(listing.manifest)
        if (manifest.group, manifest.version, manifest.digest) != (group, version, digest):
            raise ValueError("it is not the one that the next was made from")
        if not self._is_plausible(signer, manifest):
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
            if author != signer or not self._is_plausible(author, manifest):
                return self._store.newest(manifest.group)
            return await self._follow(manifest.group, author, manifest, sealed)

    async def _follow(self, group: str, signer: str, manifest: Manifest, sealed: bytes) -> Held:
        held = self._store.newest(group)
        if not is_better(signer, manifest, held):
            return held
        holders = await self._holders(group, manifest, first=signer)
        try:
            return await self._fetch(holders, manifest, sealed)
        except (TransferFailed, WireError, OSError, ValueError) as error:
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

    async def _fetch(self, holders: list[HopAddress], manifest: Manifest, sealed: bytes) -> Held:
        held = await self._payload(holders, manifest, sealed)
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
        )
        return held

    async def _ask_holders(self, group: str, held: Held) -> Held:
        """Manifests expire when a swarm sleeps; a holder still has its own, signed."""
        nodes = await self.nodes()
        for record in shuffled(nodes.values()):
            offer = holding(self._client.run, record, group)
            if offer is None or offer.version <= held.version:
                continue
            try:
                listing = await self._listing(_address(nodes, record), group, offer.version)
                if listing is not None:
                    signer, manifest = Manifest.unseal(listing.manifest)
                    if manifest.group == group and self._is_plausible(signer, manifest):
                        held = await self._follow(group, signer, manifest, listing.manifest)
            except (LinkFailed, WireError, OSError, TimeoutError) as error:
                log.debug("version.not_listed", group=group, cause=str(error))
        return held

    async def _listing(self, address: HopAddress, group: str, version: int) -> Listing | None:
        link = await self._client.dial(address, "transfer")
        try:
            await link.send(Want(group=group, version=version))
            reply = await link.receive(timeout=LISTING_SECONDS)
            return reply if isinstance(reply, Listing) else None
        finally:
            await link.close()

    async def _holders(self, group: str, manifest: Manifest, first: str) -> list[HopAddress]:
        """Who has the version: its aggregator and every node that says so, in an order of chance.

        Else all that come at the same time would ask the same ones.
        """
        nodes = await self.nodes(fresh=first not in self._nodes)
        named = [
            HopAddress(peer=peer, host=record.host, port=record.port)
            for peer, record in nodes.items()
            if peer == first
            or ((held := holding(self._client.run, record, group)) is not None and held.is_of(manifest))
        ]
        return shuffled(address for address in named if address.peer != self._client.identity.peer)

    def _is_plausible(self, signer: str, manifest: Manifest) -> bool:
        run = self._client.run
        if manifest.group not in run.groups or not run.allows(signer):
            return False
        return is_plausible(manifest, run, elements(run, manifest.group), self._client.dht.time())


def shuffled(items: Iterable[T]) -> list[T]:
    """In an order of chance."""
    return random.sample(listed := list(items), len(listed))


def _address(nodes: dict[str, NodeRecord], record: NodeRecord) -> HopAddress:
    peer = next(peer for peer, other in nodes.items() if other is record)
    return HopAddress(peer=peer, host=record.host, port=record.port)
