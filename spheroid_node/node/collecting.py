"""The aggregator's part of a node: takes in updates of its groups, writes the version, announces it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

import structlog

from spheroid_node.model.parameters import elements
from spheroid_node.net.links import Link
from spheroid_node.node.access import Client
from spheroid_node.node.clock import LONGEST_NAP, sleep_until
from spheroid_node.node.holdings import owns
from spheroid_node.node.listeners import Listeners
from spheroid_node.node.receiving import IN_MEMORY_BYTES, Arrivals, Arriving
from spheroid_node.node.screening import Screening
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.threads import to_its_end
from spheroid_node.node.versions import Held, VersionStore
from spheroid_node.rounds.aggregation import PayloadFacts, payload_facts
from spheroid_node.rounds.aggregator import Aggregator, Desk, Judged, Offer
from spheroid_node.rounds.collection import Answer
from spheroid_node.rounds.election import candidates
from spheroid_node.rounds.slots import Slots
from spheroid_node.wire.codes import ErrorCode, Verdict, WireError
from spheroid_node.wire.messages import (
    Chunk,
    Ping,
    Pong,
    Proceed,
    Receipt,
    ReceiptMessage,
    Update,
    UpdateHeader,
)
from spheroid_node.wire.tensors import chunks

log = structlog.get_logger()

CHUNK_SECONDS = 30.0
MAX_UPDATES_IN_A_ROUND = 16
"""Of one connection; a worker opens one for each group, and sends one update on it."""


class Collector:
    """Service ``round`` of a node: a :class:`Desk` behind links, and a task that closes each round."""

    def __init__(
        self,
        client: Client,
        store: VersionStore,
        sync: Synchroniser,
        groups: tuple[str, ...],
        spool: Path,
        screening: Screening,
    ) -> None:
        self._client = client
        self._store = store
        self._sync = sync
        self._groups = groups
        self._spool = spool
        self._screening = screening
        self._slots = Slots.of(client.run.round)
        self._desk = Desk(client.run)
        self._turns = {group: asyncio.Lock() for group in groups}
        self._changed = {group: asyncio.Event() for group in groups}
        self._listeners = Listeners(groups)
        self._trying = asyncio.Lock()
        self._arrivals = Arrivals(self._spooled, self._is_open)
        self._handed_over: set[str] = set()
        """Groups whose updates go to the next in rank, as this node leaves."""
        self.led = 0
        """Versions that this node has written."""

    # --- what comes in ----------------------------------------------------------------------------

    async def handle(self, link: Link) -> None:
        """One connection of a worker: any number of updates, each answered by a receipt."""
        round, sent = -1, 0
        try:
            while True:
                message = await link.receive(timeout=3 * self._slots.period)
                if isinstance(message, Ping):
                    await link.send(Pong())
                    continue
                if not isinstance(message, Update):
                    raise WireError(ErrorCode.UNEXPECTED, "an update was expected")
                now = self._round_now()
                round, sent = now, sent + 1 if now == round else 1
                if sent > MAX_UPDATES_IN_A_ROUND:
                    raise WireError(ErrorCode.BUSY, f"{MAX_UPDATES_IN_A_ROUND} updates a round are the limit")
                await self._receive(link, message)
        finally:
            self._listeners.remove(link)

    async def submit(self, envelope: bytes, payload: bytes) -> Receipt:
        """This node's own update, when it is its own aggregator."""
        peer = self._client.identity.peer
        offer = await self._offer(envelope, peer, own_header(envelope, peer))
        answer = offer.answer
        if answer is None:
            facts = await asyncio.to_thread(payload_facts, chunks(payload), offer.header.dtype)
            answer = await self._deliver(offer, facts, lambda: chunks(payload))
        return offer.receipt(answer)

    async def _receive(self, link: Link, update: Update) -> None:
        header = own_header(update.header, link.peer)
        async with self._arrivals.turn(link, header.group):
            offer = await self._offer(update.header, link.peer, header)
            answer = offer.answer
            if answer is None:
                with self._arrivals.arriving(offer, update.hashes) as arriving:
                    await self._receive_rest(link, arriving)
                    answer = await self._deliver(offer, arriving.meter.facts(), arriving.chunks)
        # Whoever has an update here waits on this link for the version; who has none finds it in the DHT.
        if answer.verdict is not Verdict.REFUSED:
            self._listeners.add(offer.header.group, link)
        receipt = offer.receipt(answer).seal(self._client.identity.key)
        await link.send(ReceiptMessage(receipt=receipt))

    async def _receive_rest(self, link: Link, arriving: Arriving) -> None:
        """The chunks of an update that are not there yet."""
        meter = arriving.meter
        await link.send(Proceed(first=meter.count))
        while not meter.complete:
            chunk = await link.receive(timeout=CHUNK_SECONDS)
            if not isinstance(chunk, Chunk) or chunk.index != meter.count:
                raise WireError(ErrorCode.UNEXPECTED, f"chunk {meter.count} was expected")
            # In a thread: the next chunk comes in meanwhile, and so do those of others.
            with self._room():
                await to_its_end(arriving.take, chunk.data)

    def _spooled(self) -> IO[bytes]:
        """An empty place for an update: no disk space of it outlives its use."""
        return SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(self._spool))

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Where the disk does not take an update, another aggregator may."""
        try:
            yield
        except OSError as error:
            self._store.disk.failed("updates of others", error)
            raise WireError(ErrorCode.BUSY, "this node has no room for an update") from error
        self._store.disk.wrote("updates of others")

    def _is_open(self, header: UpdateHeader) -> bool:
        """Whether its round still takes updates."""
        aggregator = self._desk.aggregator(header.group)
        collection = None if aggregator is None else aggregator.collection
        return collection is not None and collection.round == header.round and not collection.is_closed

    async def _offer(self, envelope: bytes, author: str, header: UpdateHeader) -> Offer:
        """Judge the header in the envelope."""
        if header.group in self._handed_over:
            raise WireError(ErrorCode.LEAVING)
        if header.group in self._groups and header.run == self._client.run.run_id:
            await self._open(header.group, header.round)
            aggregator = self._desk.aggregator(header.group)
            if aggregator is not None and not aggregator.collection.knows(author):
                aggregator.collection.expect(await self._live(header.group, fresh=True))
        return self._desk.offer(envelope, self._client.dht.time())

    async def _deliver(
        self, offer: Offer, facts: PayloadFacts, read: Callable[[], Iterator[bytes | memoryview]]
    ) -> Answer:
        """Try an update out if the run wants that, judge it, and add it; ``read`` gives its payload."""
        group = offer.header.group
        facts = await self._tried(offer, facts, read)
        if group in self._handed_over:
            raise WireError(ErrorCode.LEAVING)
        async with self._turns[group]:
            judged = self._desk.judge(offer, facts, self._client.dht.time())
            aggregator = self._desk.aggregator(group)
            if judged.is_new and aggregator is not None:
                await self._add(aggregator, judged, read())
        self._changed[group].set()
        return judged.answer

    async def _add(
        self, aggregator: Aggregator, judged: Judged, payload: Iterator[bytes | memoryview]
    ) -> None:
        """In a thread: the sum of a large group takes longer than a loop may stand still."""
        try:
            with self._room():
                await to_its_end(aggregator.add, judged, payload)
        except asyncio.CancelledError:
            raise  # it was added all the same
        except BaseException:
            aggregator.withdraw(judged)
            raise

    async def _tried(
        self, offer: Offer, facts: PayloadFacts, read: Callable[[], Iterator[bytes | memoryview]]
    ) -> PayloadFacts:
        aggregator = self._desk.aggregator(offer.header.group)
        assert aggregator is not None
        collection = aggregator.collection
        async with self._trying:  # one whole update in memory, however many wait on disk for the trainer
            if not collection.is_worth_trying(offer.author, facts, self._client.dht.time()):
                return facts
            payload = await asyncio.to_thread(b"".join, read())
            scale = collection.scale_of(facts.norm)
            return replace(facts, worse_by=await self._screening.worse_by(offer.header, payload, scale))

    # --- the round --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Open every group's rounds in turn and close each at τ, or when all were heard. For ever."""
        await self._announce_again()
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in self._groups:
                    tasks.create_task(self._run_group(group), name=f"collect {group}")
        finally:
            for group in self._groups:
                self._arrivals.forget(group)
            await self._listeners.stop()

    async def _announce_again(self) -> None:
        """A version that this node wrote may never have been announced, should it have died in between."""
        for group in self._groups:
            held = self._store.newest(group)
            if held.signer == self._client.identity.peer:
                await self._client.directory.publish_manifest(group, held.sealed)

    async def leave(self, patience: float) -> None:
        """Finish the rounds whose deadline is at most ``patience`` seconds away; hand the others over."""
        await asyncio.gather(*(self._leave_group(group, patience) for group in self._groups))
        await self._listeners.finish()

    async def _leave_group(self, group: str, patience: float) -> None:
        aggregator, clock = self._desk.aggregator(group), self._client.dht.time
        if aggregator is None or aggregator.collection.is_closed:
            self._handed_over.add(group)
        elif aggregator.collection.deadline - clock() <= patience:
            await sleep_until(clock, aggregator.collection.deadline)
            async with self._turns[group]:
                await self._close(group, aggregator)
        else:
            self._handed_over.add(group)
            aggregator.collection.close()
            self._arrivals.forget(group)
            await self._listeners.turn_away(group, WireError(ErrorCode.LEAVING))

    async def _run_group(self, group: str) -> None:
        while True:
            changed = self._changed[group]
            changed.clear()
            aggregator = self._desk.aggregator(group)
            if aggregator is None or aggregator.collection.is_closed:
                await changed.wait()
                continue
            collection = aggregator.collection
            now = self._client.dht.time()
            if collection.is_over(now):
                async with self._turns[group]:
                    await self._close(group, aggregator)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(collection.deadline - now, LONGEST_NAP)):
                    await changed.wait()

    async def _open(self, group: str, round: int) -> None:
        """Make room for updates of ``round``, unless it is still far or the one before collects."""
        async with self._turns[group]:
            current = self._desk.aggregator(group)
            now_round = self._round_now()
            round = min(round, now_round + 1)
            if current is not None and current.collection.round > now_round + 1:
                current.collection.close()  # opened when our clock was ahead
                current = None
            if current is not None:
                if round <= current.collection.round:
                    return
                if not current.collection.is_closed:
                    if round > now_round:
                        return
                    await self._close(group, current)
            held = self._store.newest(group)
            if held.round < round - 1:
                held = await self._sync.sync(group)
            # A round that has its version takes nothing more.
            round = max(round, min(held.round, now_round) + 1)
            live = await self._live(group)
            size = elements(self._client.run, group)
            self._desk.open(Aggregator(self._client.run, group, round, held.base, size, live, self._spooled))
            self._listeners.forget(group)
            self._arrivals.forget(group)
            self._changed[group].set()

    def _round_now(self) -> int:
        return self._slots.round_at(self._client.dht.time())

    async def _live(self, group: str, fresh: bool = False) -> set[str]:
        """Peers that own a replica of ``group`` now, this one included."""
        nodes = await self._sync.nodes(fresh)
        return {peer for peer, record in nodes.items() if owns(record, group)} | {self._client.identity.peer}

    async def _close(self, group: str, aggregator: Aggregator) -> None:
        collection = aggregator.collection
        base = self._store.get(group, collection.base.version)
        ranked = candidates(collection.run, group, collection.round, await self._live(group))
        rank = ranked.index(self._client.identity.peer)
        collection.close()
        self._arrivals.forget(group)
        stale = base is None or base.digest != collection.base.digest
        if stale or self._store.newest(group).version != collection.base.version:
            # Another aggregator has already made the next version: this one steps back.
            return
        assert base is not None
        result = await to_its_end(aggregator.result, base.payload)
        if result is None:
            return
        made = aggregator.version(result, rank)
        sealed = made.manifest.seal(self._client.identity.key)
        held = await asyncio.to_thread(Held.of, group, made.manifest.version, made.payload, sealed)
        if await asyncio.to_thread(self._store.adopt, held) is not held:
            return
        self.led += 1
        self._log_led(held)
        self._listeners.tell(group, sealed)
        await self._client.directory.publish_manifest(group, sealed)

    def _log_led(self, held: Held) -> None:
        manifest = held.manifest
        assert manifest is not None
        verdicts = [update.verdict for update in manifest.updates]
        described = {"round": manifest.round, "group": manifest.group, "version": manifest.version}
        described |= {"digest": manifest.digest.hex(), "total": manifest.total}
        log.info(
            "round.led",
            **described,
            **{str(verdict): verdicts.count(verdict) for verdict in Verdict}
            | {str(Verdict.ACCEPTED): manifest.accepted},
            workers=len({update.peer for update in manifest.updates}) + len(manifest.beside),
        )
        log.info("round.version", **described)


def own_header(envelope: bytes, sender: str) -> UpdateHeader:
    """Raises :class:`WireError` for an update that its author did not send itself."""
    author, header = UpdateHeader.unseal(envelope)
    if author != sender:
        raise WireError(ErrorCode.NOT_AUTHENTIC, "an update comes from its author")
    return header
