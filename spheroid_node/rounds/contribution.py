"""One worker's side of one group: what it sends in a round, and what becomes of it.

line = {manifest.version: manifest, …}         # of the versions that the worker follows now
contributor.settle(line)                       # at the start of a slot, before the next update
contributor.recount(line)
submission = contributor.prepare(round, base, update, steps, tokens, nonce)
… submission.header.seal(key) and submission.payload to the aggregator …
contributor.answered(receipt)                  # if one comes
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.ledger import (
    Ledger,
    Line,
    Settled,
    Shares,
    Submission,
    held,
    recount,
    refuse,
    settle,
    shares,
)
from spheroid_node.rounds.residual import DECAY, Residual
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import Receipt, UpdateHeader
from spheroid_node.wire.tensors import Vector, encode_vector, payload_digest

SPOILT = frozenset({Reason.NOT_FINITE, Reason.NORM_TOO_LARGE, Reason.WORSE})
"""Refusals for what an update is: what it adds is dropped, as it would be refused again."""


@dataclass(frozen=True)
class Kept:
    """What a worker must remember of a group over its own end.

    That is a few updates as they were sent. What it holds follows from them, but for what their compression
    has rounded off: not worth writing every round what only a restart loses.
    """

    submission: Submission | None = None
    """The open update."""
    receipt: Receipt | None = None
    parts: Shares = field(default_factory=dict)
    """What the open update carries of those in :attr:`settled`."""
    settled: Ledger = ()
    refused: bool = False
    """Whether what is left over was in an update that was refused for what it is."""


@dataclass(frozen=True)
class _Open:
    """An update that was sent, until a manifest shows what became of it."""

    sent: Vector
    submission: Submission
    parts: Shares
    receipt: Receipt | None = None


class Contributor:
    """Builds a worker's updates of one group and keeps what no manifest contains."""

    def __init__(self, run: RunSpec, group: str, elements: int, decay: float = DECAY) -> None:
        self._run = run
        self._group = group
        self._elements = elements
        self.residual = Residual(elements, decay)
        self._open: _Open | None = None
        self._settled: Ledger = ()
        self._refused = False
        """See :attr:`Kept.refused`."""

    def kept(self) -> Kept:
        """All that :meth:`resume` needs."""
        if self._open is None:
            return Kept(settled=self._settled, refused=self._refused)
        opened = self._open
        return Kept(opened.submission, opened.receipt, opened.parts, self._settled, self._refused)

    def resume(self, kept: Kept) -> None:
        """Go on from what another contributor of the same group had :meth:`kept`."""
        opened = None
        if kept.submission is not None:
            opened = _Open(kept.submission.delivered(), kept.submission, kept.parts, kept.receipt)
        self.residual.vector = held(kept.settled, self._elements)
        self._open, self._settled, self._refused = opened, kept.settled, kept.refused

    @property
    def left_over(self) -> Vector:
        """What local training begins with, on top of the version.

        Training that began at the version itself would learn the same once more, and the next update would
        carry it twice: with one late round the step is nearly doubled, and the model thrown back.
        """
        return self.residual.vector

    def prepare(
        self, round: int, base: Base, update: Vector, steps: int, tokens: int, nonce: bytes
    ) -> Submission:
        """The update of a round: what was learnt on top of :attr:`left_over`, and that, compressed.

        An update of an earlier round that is still open counts as not taken. Raises :class:`ValueError`
        for an update that is not finite or has another number of elements.
        """
        if update.shape != (self._elements,) or not np.isfinite(update).all():
            raise ValueError(f"update of {self._group} is not {self._elements} finite values")
        if self._open:
            self.settle({})
        dtype = self._run.round.compression
        sent = self.residual.add_to(update)
        payload = encode_vector(sent, dtype)
        header = UpdateHeader(
            run=self._run.run_id,
            group=self._group,
            round=round,
            base=base.version,
            base_digest=base.digest,
            nonce=nonce,
            steps=steps,
            tokens=tokens,
            norm=float(np.linalg.norm(sent.astype(np.float64))),
            dtype=dtype,
            elements=self._elements,
            digest=payload_digest(payload),
        )
        self._open = _Open(sent, Submission(header, payload), shares(self._settled))
        return self._open.submission

    def answered(self, receipt: Receipt) -> None:
        """Remember the receipt of the open update; one of another update is ignored."""
        if self._open and receipt.update == self._open.submission.header.digest:
            self._open = replace(self._open, receipt=receipt)

    @property
    def versions_wanted(self) -> set[int]:
        """Versions whose manifests tell what became of its last updates."""
        submissions = [settled.submission for settled in self._settled]
        if self._open is not None:
            submissions.append(self._open.submission)
        return {submission.header.base + 1 for submission in submissions}

    def settle(self, line: Line) -> bool | None:
        """Decide about the open update by the manifests of the versions that are followed.

        A receipt is only a promise: the aggregator may die, or its manifest lose to another. So the
        manifest decides, and the receipt only where the version made from this base was never seen. True if a
        version contains it; None if no update is open.
        """
        if self._open is None:
            return None
        opened, self._open = self._open, None
        header, receipt = opened.submission.header, opened.receipt
        contained = self._contains(line, header, receipt)
        if not contained and receipt and receipt.reason in SPOILT:
            self._refuse(opened)
            return False
        self.residual.settle(opened.sent, opened.submission.delivered(), contained)
        self._settled = settle(self._settled, opened.submission, opened.parts, contained, self.residual.decay)
        self._refused = False
        return contained

    def _refuse(self, opened: _Open) -> None:
        """Drop what the update added, and keep what it carried: that may have been accepted before.

        One aggregator's word must not undo another's. But what was carried may itself be what spoils the
        updates, and costs a round's learning each time: so it goes with the second refusal in a row.
        """
        kept = 0.0 if self._refused else self.residual.decay
        self._settled = refuse(self._settled, opened.submission, opened.parts, kept)
        self.residual.vector = held(self._settled, self._elements)
        self._refused = not self._refused

    def recount(self, line: Line) -> list[Settled]:
        """Correct what was decided about the last updates, should a version have changed.

        It may be announced after all, or lose to another: then what was carried on is taken back, or what was
        not is. Returns such updates as they are now. An update that is still open is settled first.
        """
        self.settle(line)
        self._settled, changed, change = recount(self._settled, line, self.residual.decay)
        if change is not None:
            self.residual.vector = self.residual.vector + change  # the trainer may be loading the old one
        return changed

    @staticmethod
    def _contains(line: Line, header: UpdateHeader, receipt: Receipt | None) -> bool:
        made = line.get(header.base + 1)
        if made is not None:
            return made.contains(header.digest)
        if max(line, default=0) <= header.base:
            return False
        return receipt is not None and receipt.verdict is Verdict.ACCEPTED
