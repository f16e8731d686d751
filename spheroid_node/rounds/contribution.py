"""One worker's side of one group: what it sends in a round, and what becomes of it.

line = {manifest.version: manifest, …}         # of the versions that the worker follows now
contributor.recount(line)                      # at the start of a slot, before the next update
contributor.settle(line)
submission = contributor.prepare(round, base, update, steps, tokens, nonce)
… submission.header.seal(key) and submission.payload to the aggregator …
contributor.answered(receipt)                  # if one comes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.residual import DECAY, Residual
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import Manifest, Receipt, UpdateHeader
from spheroid_node.wire.tensors import Vector, decode_vector, encode_vector, payload_digest

SPOILT = frozenset({Reason.NOT_FINITE, Reason.NORM_TOO_LARGE, Reason.DUPLICATE, Reason.WORSE})
"""Refusals after which an update is dropped: sent again it would be refused again, or count twice."""


Line = Mapping[int, Manifest]
"""By version, the manifests of a group that a worker follows and still has."""


@dataclass(frozen=True)
class Submission:
    """A header still to be sealed, and the compressed update that it describes."""

    header: UpdateHeader
    payload: bytes


@dataclass(frozen=True)
class Kept:
    """What a worker must remember of a group over its own end."""

    residual: Vector
    sent: Vector | None = None
    """The open update as it was before its compression; None, as the two below, where none is open."""
    submission: Submission | None = None
    receipt: Receipt | None = None
    settled: Settled | None = None


@dataclass(frozen=True)
class Settled:
    """The last update that was open, and what was taken to have become of it."""

    submission: Submission
    contained: bool


@dataclass(frozen=True)
class _Open:
    """An update that was sent, until a manifest shows what became of it."""

    sent: Vector
    submission: Submission
    receipt: Receipt | None = None


class Contributor:
    """Builds a worker's updates of one group and keeps what no manifest contains."""

    def __init__(self, run: RunSpec, group: str, elements: int, decay: float = DECAY) -> None:
        self._run = run
        self._group = group
        self._elements = elements
        self.residual = Residual(elements, decay)
        self._open: _Open | None = None
        self._settled: Settled | None = None

    def kept(self) -> Kept:
        """All that :meth:`resume` needs."""
        if self._open is None:
            return Kept(self.residual.vector, settled=self._settled)
        opened = self._open
        return Kept(self.residual.vector, opened.sent, opened.submission, opened.receipt, self._settled)

    def resume(self, kept: Kept) -> None:
        """Go on from what another contributor of the same group had :meth:`kept`."""
        self.residual.vector = kept.residual
        self._open, self._settled = None, kept.settled
        if kept.sent is not None and kept.submission is not None:
            self._open = _Open(kept.sent, kept.submission, kept.receipt)

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
        self._open = _Open(sent, Submission(header, payload))
        return self._open.submission

    def answered(self, receipt: Receipt) -> None:
        """Remember the receipt of the open update; one of another update is ignored."""
        if self._open and receipt.update == self._open.submission.header.digest:
            self._open = _Open(self._open.sent, self._open.submission, receipt)

    @property
    def versions_wanted(self) -> set[int]:
        """Versions whose manifests tell what became of its last two updates."""
        submissions = [item.submission for item in (self._open, self._settled) if item is not None]
        return {submission.header.base + 1 for submission in submissions}

    def recount(self, line: Line) -> tuple[bytes, bool] | None:
        """Correct what was decided about the update before the open one, should the version have changed.

        It may be announced after all, or lose to another: then what was carried on is taken back, or what was
        not is. Returns the digest of such an update, and whether a version contains it.
        """
        settled = self._settled
        made = line.get(settled.submission.header.base + 1) if settled else None
        if settled is None or made is None:
            return None
        header = settled.submission.header
        contained = made.contains(header.digest)
        if contained == settled.contained:
            return None
        self._settled = replace(settled, contained=contained)
        change = self.residual.change(decode_vector(settled.submission.payload, header.dtype), contained)
        if self._open is None:
            self.residual.vector = self.residual.vector + change  # the old one may be on its way to disk
        else:  # the open update was made with what was left over then
            self._open = replace(self._open, sent=self._open.sent + change)
        return header.digest, contained

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
            self.residual.clear()
            self._settled = None
            return False
        delivered = decode_vector(opened.submission.payload, header.dtype)
        self.residual.settle(opened.sent, delivered, contained)
        self._settled = Settled(opened.submission, contained)
        return contained

    @staticmethod
    def _contains(line: Line, header: UpdateHeader, receipt: Receipt | None) -> bool:
        made = line.get(header.base + 1)
        if made is not None:
            return made.contains(header.digest)
        if max(line, default=0) <= header.base:
            return False
        return receipt is not None and receipt.verdict is Verdict.ACCEPTED
