"""One candidate's side of one group in one round: from sealed headers to a version and its manifest.

The network's part is only to carry envelopes and chunks, and to sign receipts and the manifest:

    offer = desk.offer(envelope, now)            # unsealed and judged; the payload is wanted if its
    meter = offer.meter()                        # answer is None
    … meter.feed(chunk) and write the chunk to a spool file, until meter.complete …
    answer = desk.deliver(offer, meter.facts(), chunks_of_the_spool_file, now)
    receipt = offer.receipt(answer).seal(key)
    … until aggregator.collection.is_over(now) …
    version = aggregator.close(base_payload, rank)       # None: the version stands

What takes long, ``add`` and ``result``, touches the sum alone, and may be done in a thread while headers are
judged:

    judged = desk.judge(offer, facts, now)
    if judged.is_new: aggregator.add(judged, chunks)     # withdraw(judged) should it fail
    …
    result = aggregator.result(base_payload)
    version = aggregator.version(result, rank)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spheroid_node.rounds.aggregation import Accumulator, PayloadFacts, PayloadMeter
from spheroid_node.rounds.collection import LATE, Answer, Base, Collection
from spheroid_node.rounds.outer import next_payload
from spheroid_node.rounds.robust import Keep, LateClipper, Sorter
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import ErrorCode, Reason, Verdict, WireError
from spheroid_node.wire.messages import Manifest, Receipt, UpdateHeader
from spheroid_node.wire.tensors import (
    Vector,
    chunk_count,
    digest_of_hashes,
    encoded_size,
    split_hashes,
    vector_digest,
)


@dataclass(frozen=True)
class Offer:
    """An update's author and header, and the answer to it; None while its payload is wanted."""

    author: str
    header: UpdateHeader
    answer: Answer | None

    def meter(self, hashes: bytes | None = None) -> PayloadMeter:
        """Measures the payload as it arrives; its size was checked with the header.

        With the ``hashes`` of all its chunks, one after the other, each chunk proves itself. Raises
        :class:`WireError` (not-authentic) where they are not those of the digest that was signed.
        """
        size = encoded_size(self.header.elements, self.header.dtype)
        if hashes is None:
            return PayloadMeter(self.header.dtype, size)
        proven = split_hashes(hashes)
        if len(proven) != chunk_count(size) or digest_of_hashes(proven) != self.header.digest:
            raise WireError(ErrorCode.NOT_AUTHENTIC, "the chunk hashes do not match the update's digest")
        return PayloadMeter(self.header.dtype, size, proven)

    def receipt(self, answer: Answer) -> Receipt:
        """The receipt, still to be sealed."""
        header = self.header
        return Receipt(
            run=header.run,
            group=header.group,
            round=header.round,
            update=header.digest,
            verdict=answer.verdict,
            reason=answer.reason,
        )


@dataclass(frozen=True)
class Judged:
    """An update's answer and, where ``is_new``, what it counts in the sum that it is still to be added to."""

    offer: Offer
    answer: Answer
    is_new: bool = False
    weight: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class Result:
    """The payload that a round made (rounds/outer.py), and its digest."""

    payload: Vector
    digest: bytes


@dataclass(frozen=True)
class NewVersion:
    """The payload that a round made (rounds/outer.py), and its description, still to be sealed."""

    payload: Vector
    manifest: Manifest

    @property
    def vector(self) -> Vector:
        """Its parameters alone."""
        return self.payload[: self.manifest.elements]


class Aggregator:
    """A :class:`Collection` with the sum of what it accepted.

    Every candidate may hold one for each of its groups: the sum is made when the first update is accepted.
    ``keep`` opens a place for an update that the run's rule must have until the end.
    """

    def __init__(
        self,
        run: RunSpec,
        group: str,
        round: int,
        base: Base,
        elements: int,
        expected: Iterable[str],
        keep: Keep,
    ) -> None:
        self.collection = Collection(run, group, round, base, elements, expected)
        self._keep = keep
        self._accumulator: Accumulator | Sorter | LateClipper | None = None

    def deliver(
        self, offer: Offer, facts: PayloadFacts, chunks: Iterable[bytes | memoryview], now: float
    ) -> Answer:
        """Judge a payload and, if it is accepted, add it. If ``chunks`` raises, nothing has happened."""
        judged = self.judge(offer, facts, now)
        if judged.is_new:
            try:
                self.add(judged, chunks)
            except BaseException:
                self.withdraw(judged)
                raise
        return judged.answer

    def judge(self, offer: Offer, facts: PayloadFacts, now: float) -> Judged:
        """A repeated delivery gets its first answer again, and is not new."""
        known = self.collection.has_accepted(offer.author)
        answer = self.collection.payload(offer.author, facts, now)
        if answer.verdict is not Verdict.ACCEPTED or known:
            return Judged(offer, answer)
        weight, scale = self.collection.weight(offer.author), self.collection.scale(offer.author)
        return Judged(offer, answer, True, weight, scale)

    def add(self, judged: Judged, chunks: Iterable[bytes | memoryview]) -> None:
        """Add a new update. If ``chunks`` raises, the sum is as it was."""
        if self._accumulator is None:
            self._accumulator = self._empty()
        self._accumulator.add(chunks, judged.offer.header.dtype, judged.weight, judged.scale)

    def withdraw(self, judged: Judged) -> None:
        """A new update could not be added after all."""
        self.collection.withdraw(judged.offer.author)

    def _empty(self) -> Accumulator | Sorter | LateClipper:
        rule, elements = self.collection.run.round, self.collection.elements
        if rule.aggregation == "median":
            return Sorter(elements, 0.5, self._keep)
        if rule.aggregation == "trimmed-mean":
            return Sorter(elements, rule.trim, self._keep)
        if rule.aggregation == "clipped" and not any(self.collection.base.norms):
            return LateClipper(elements, rule.clip_factor, self._keep)
        return Accumulator(elements)

    def close(self, base_payload: Vector, rank: int) -> NewVersion | None:
        """End the round; ``rank`` is this peer's place in the ranking. None if nothing was accepted."""
        self.collection.close()
        result = self.result(base_payload)
        return None if result is None else self.version(result, rank)

    def result(self, base_payload: Vector) -> Result | None:
        """What a closed round makes of the base; None if nothing was accepted. Can be had once."""
        if self._accumulator is None or not self.collection.accepted():
            return None
        mean, self._accumulator = self._accumulator.mean(), None
        payload = next_payload(self.collection.run.training, base_payload, mean)
        return Result(payload, vector_digest(payload))

    def version(self, result: Result, rank: int) -> NewVersion:
        """With its manifest."""
        collection = self.collection
        manifest = Manifest(
            run=collection.run_id,
            group=collection.group,
            round=collection.round,
            version=collection.base.version + 1,
            parent=collection.base.digest,
            digest=result.digest,
            elements=collection.elements,
            rank=rank,
            steps=collection.steps(),
            total=collection.base.total + len(collection.accepted()),
            updates=collection.outcomes(),
            also=collection.also(),
        )
        return NewVersion(result.payload, manifest)


class Desk:
    """Where a node takes in updates: the aggregator of the current round for each of its groups."""

    def __init__(self, run: RunSpec) -> None:
        self._run_id = run.run_id
        self._aggregators: dict[str, Aggregator] = {}

    def open(self, aggregator: Aggregator) -> None:
        """A new round of its group begins; the one before it takes nothing more."""
        self._aggregators[aggregator.collection.group] = aggregator

    def aggregator(self, group: str) -> Aggregator | None:
        return self._aggregators.get(group)

    def offer(self, envelope: bytes, now: float) -> Offer:
        """Unseal and judge a header. Raises :class:`WireError` (malformed, not-authentic)."""
        author, header = UpdateHeader.unseal(envelope)
        aggregator = self._aggregators.get(header.group)
        if aggregator is None:
            reason = Reason.WRONG_GROUP if header.run == self._run_id else Reason.WRONG_RUN
            return Offer(author, header, Answer(Verdict.REFUSED, reason))
        return Offer(author, header, aggregator.collection.header(author, header, now))

    def deliver(
        self, offer: Offer, facts: PayloadFacts, chunks: Iterable[bytes | memoryview], now: float
    ) -> Answer:
        """Judge and add a payload; one whose round has made way for the next meanwhile is late."""
        aggregator = self._of(offer)
        return LATE if aggregator is None else aggregator.deliver(offer, facts, chunks, now)

    def judge(self, offer: Offer, facts: PayloadFacts, now: float) -> Judged:
        """As :meth:`deliver`, for an aggregator whose ``add`` is called after it."""
        aggregator = self._of(offer)
        return Judged(offer, LATE) if aggregator is None else aggregator.judge(offer, facts, now)

    def _of(self, offer: Offer) -> Aggregator | None:
        aggregator = self._aggregators[offer.header.group]
        return aggregator if aggregator.collection.round == offer.header.round else None
