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
from spheroid_node.wire.codes import REASONS, ErrorCode, Verdict, WireError
from spheroid_node.wire.messages import (
    Chunk,
    HopAddress,
    ManifestMessage,
    Proceed,
    Receipt,
    ReceiptMessage,
    Update,
)
from spheroid_node.wire.records import NodeRecord
from spheroid_node.wire.tensors import chunks

log = structlog.get_logger()

ANSWER_SECONDS = 20.0


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
        for peer in ranked:
            try:
                if peer == self._client.identity.peer:
                    began = time.monotonic()
                    receipt = await self._collector.submit(envelope, submission.payload)
                    delivery = Delivery(peer, receipt, None, time.monotonic() - began)
                    return self._delivered(submission, delivery)
                record = nodes[peer]
                address = HopAddress(peer=peer, host=record.host, port=record.port)
                return self._delivered(submission, await self._send(address, envelope, submission))
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
            message = await delivery.link.receive(timeout=max(0.0, seconds))
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
            with contextlib.suppress(OSError, WireError):
                await delivery.link.close()
        return True

    async def _send(self, address: HopAddress, envelope: bytes, submission: Submission) -> Delivery:
        began = time.monotonic()
        link = await self._client.dial(address, "round")
        try:
            await link.send(Update(header=envelope))
            answer = await link.receive(timeout=ANSWER_SECONDS)
            if isinstance(answer, Proceed):
                for index, chunk in enumerate(chunks(submission.payload)):
                    await link.send(Chunk(index=index, data=bytes(chunk)), ANSWER_SECONDS)
                answer = await link.receive(timeout=ANSWER_SECONDS)
            if not isinstance(answer, ReceiptMessage):
                raise WireError(ErrorCode.UNEXPECTED, "a receipt was expected")
            receipt = self._checked(address.peer, answer.receipt, submission)
            return Delivery(address.peer, receipt, link, time.monotonic() - began)
        except BaseException:
            with contextlib.suppress(OSError, WireError, asyncio.CancelledError):
                await link.close()
            raise

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
