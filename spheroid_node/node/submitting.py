"""A worker's update on its way: to the first aggregator in the ranking that answers, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from spheroid_node.net.links import Link, LinkClosed, LinkFailed
from spheroid_node.node.access import Client
from spheroid_node.node.collecting import Collector
from spheroid_node.node.sync import Synchroniser
from spheroid_node.rounds.ledger import Submission
from spheroid_node.rounds.slots import Slots
from spheroid_node.wire.codes import REASONS, ErrorCode, Verdict, WireError
from spheroid_node.wire.messages import (
    Chunk,
    HopAddress,
    ManifestMessage,
    Message,
    Ping,
    Pong,
    Proceed,
    Receipt,
    ReceiptMessage,
    Update,
)
from spheroid_node.wire.records import NodeRecord
from spheroid_node.wire.tensors import chunk_count, chunk_hashes, chunks

log = structlog.get_logger()

ANSWER_SECONDS = 20.0
PAUSES = (0.5, 2.0)
"""Before an aggregator is dialled again whose connection broke under an update: it keeps what it has."""

PING_SECONDS = 2.0
"""Between two questions to an aggregator whether it is still there."""
UNANSWERED = 3
"""Pings after which it is taken for lost: 8 s after it was last heard."""


@dataclass
class Delivery:
    """Where an update went. ``link`` is open while the aggregator owes its manifest; None if that is us."""

    aggregator: str
    receipt: Receipt
    link: Link | None
    seconds: float
    """How long this aggregator took, without those that were skipped."""


class Submitter:
    """Carries updates to aggregators."""

    def __init__(self, client: Client, collector: Collector, sync: Synchroniser) -> None:
        self._client = client
        self._collector = collector
        self._sync = sync

    async def deliver(
        self, submission: Submission, ranked: Iterable[str], nodes: dict[str, NodeRecord]
    ) -> Delivery | None:
        """Hand an update to the first of ``ranked`` that answers; None if nobody did."""
        envelope = submission.header.seal(self._client.identity.key)
        hashes = await asyncio.to_thread(chunk_hashes, submission.payload)
        update = Update(header=envelope, hashes=hashes)
        for peer in ranked:
            try:
                if peer == self._client.identity.peer:
                    began = time.monotonic()
                    receipt = await self._collector.submit(envelope, submission.payload)
                    delivery = Delivery(peer, receipt, None, time.monotonic() - began)
                    return self._delivered(submission, delivery)
                record = nodes[peer]
                address = HopAddress(peer=peer, host=record.host, port=record.port)
                return self._delivered(submission, await self._send(address, update, submission))
            except (LinkFailed, WireError, OSError, TimeoutError) as error:
                log.warning(
                    "round.aggregator_skipped",
                    round=submission.header.round,
                    group=submission.header.group,
                    aggregator=peer,
                    cause=str(error) or type(error).__name__,
                )
        return None

    async def await_manifest(self, delivery: Delivery, seconds: float) -> bool:
        """Follow the manifest that the aggregator sends on the update's own connection, and hang up.

        False if the aggregator is gone: it may never send one. It sends none to who has no update there.
        """
        if delivery.link is None:
            return True
        if delivery.receipt.verdict is Verdict.REFUSED:
            await delivery.link.close()
            return True
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                message = await self._listen(delivery.link, delivery.receipt.round)
            if not isinstance(message, ManifestMessage):  # it leaves
                return False
            await self._sync.follow(delivery.aggregator, message.manifest)
        except LinkClosed as error:
            log.debug("round.aggregator_gone", aggregator=delivery.aggregator, cause=str(error))
            return False
        except (LinkFailed, WireError, OSError, TimeoutError) as error:
            # The DHT has it too, or will have it: the settling loop asks there.
            log.debug("round.manifest_not_pushed", aggregator=delivery.aggregator, cause=str(error))
        finally:
            delivery.link.abort()  # whoever is silent would not take a goodbye either
        return True

    async def _listen(self, link: Link, round: int) -> Message:
        """The next message that says something. Raises :class:`LinkClosed` for an aggregator that is silent.

        It may be stopped or cut off while its connection seems to stand. After τ nobody else would take the
        update, and so it is no longer asked.
        """
        deadline, unanswered = Slots.of(self._client.run.round).deadline(round), 0
        while True:
            try:
                message = await link.receive(PING_SECONDS)
            except TimeoutError:
                if self._client.dht.time() >= deadline:
                    continue
                if unanswered == UNANSWERED:
                    raise LinkClosed(f"{link.peer} has not answered {UNANSWERED} pings") from None
                with contextlib.suppress(TimeoutError):
                    await link.send(Ping(), PING_SECONDS)
                unanswered += 1
            else:
                if not isinstance(message, Pong):
                    return message
                unanswered = 0

    async def _send(self, address: HopAddress, update: Update, submission: Submission) -> Delivery:
        """Over one connection, or what is left of it over the next where one breaks."""
        began, pauses = time.monotonic(), list(PAUSES)
        upload = _Upload(update, submission.payload)
        while True:
            link = await self._client.dial(address, "round")
            try:
                receipt = self._checked(address.peer, await upload.over(link), submission)
                return Delivery(address.peer, receipt, link, time.monotonic() - began)
            except LinkClosed as error:
                link.abort()
                if not upload.broke_off or not pauses or not self._is_time_left(submission, pauses[0]):
                    raise
                log.info("round.broken_off", aggregator=address.peer, chunks=upload.sent, cause=str(error))
            except BaseException:
                link.abort()
                raise
            await asyncio.sleep(pauses.pop(0))

    def _is_time_left(self, submission: Submission, seconds: float) -> bool:
        """Whether its round still takes an update then."""
        deadline = Slots.of(self._client.run.round).deadline(submission.header.round)
        return self._client.dht.time() + seconds < deadline

    def _checked(self, aggregator: str, sealed: bytes, submission: Submission) -> Receipt:
        author, receipt = Receipt.unseal(sealed)
        header = submission.header
        named = (receipt.run, receipt.group, receipt.round, receipt.update)
        if author != aggregator or named != (header.run, header.group, header.round, header.digest):
            raise WireError(ErrorCode.NOT_AUTHENTIC, "the receipt is not for this update")
        return receipt

    def _delivered(self, submission: Submission, delivery: Delivery) -> Delivery:
        receipt = delivery.receipt
        log.info(
            "round.receipt",
            round=submission.header.round,
            group=submission.header.group,
            update=submission.header.digest.hex(),
            verdict=str(receipt.verdict),
            reason=str(receipt.reason),
            meaning=REASONS[receipt.reason],
            aggregator=delivery.aggregator,
        )
        return delivery


class _Upload:
    """An update on its way to one aggregator."""

    def __init__(self, update: Update, payload: bytes) -> None:
        self._update = update
        self._payload = payload
        self._first = -1
        """The chunk that was asked for last time."""
        self.sent = 0
        """Chunks, over the last connection."""
        self.broke_off = False
        """Whether it was taken so far: a connection that ended then may have broken."""

    async def over(self, link: Link) -> bytes:
        """Send what the aggregator lacks; its receipt. Raises :class:`LinkClosed` where the link breaks."""
        self.broke_off, self.sent = False, 0
        await link.send(self._update)
        answer = await link.receive(timeout=ANSWER_SECONDS)
        if isinstance(answer, Proceed):
            self._goes_on(answer.first)
            await self._send_from(answer.first, link)
            answer = await link.receive(timeout=ANSWER_SECONDS)
        if not isinstance(answer, ReceiptMessage):
            raise WireError(ErrorCode.UNEXPECTED, "a receipt was expected")
        return answer.receipt

    def _goes_on(self, first: int) -> None:
        if first > chunk_count(len(self._payload)):
            raise WireError(ErrorCode.UNEXPECTED, f"there is no chunk {first}")
        if first <= self._first:  # it would break off there for ever: a disk is full, say
            raise LinkClosed("the aggregator has nothing of what it was sent last time")
        self._first, self.broke_off = first, True

    async def _send_from(self, first: int, link: Link) -> None:
        try:
            for index, chunk in enumerate(chunks(self._payload)):
                if index >= first:
                    await link.send(Chunk(index=index, data=bytes(chunk)), ANSWER_SECONDS)
                    self.sent += 1
        except TimeoutError as error:
            raise LinkClosed(f"{link.peer} takes no more") from error
