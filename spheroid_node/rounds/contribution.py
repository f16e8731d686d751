"""One worker's side of one group: what it sends in a round, and what becomes of it.

contributor.settle(newest_manifest)            # at the start of a slot, before the next update
submission = contributor.prepare(round, base, update, steps, tokens, nonce)
… submission.header.seal(key) and submission.payload to the aggregator …
contributor.answered(receipt)                  # if one comes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.residual import DECAY, Residual
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import Manifest, Receipt, UpdateHeader
from spheroid_node.wire.tensors import Vector, decode_vector, encode_vector, payload_digest

SPOILT = frozenset({Reason.NOT_FINITE, Reason.NORM_TOO_LARGE, Reason.DUPLICATE, Reason.WORSE})
"""Refusals after which an update is dropped: sent again it would be refused again, or count twice."""


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

    def kept(self) -> Kept:
        """All that :meth:`resume` needs."""
        if self._open is None:
            return Kept(self.residual.vector)
        return Kept(self.residual.vector, self._open.sent, self._open.submission, self._open.receipt)

    def resume(self, kept: Kept) -> None:
        """Go on from what another contributor of the same group had :meth:`kept`."""
        self.residual.vector = kept.residual
        self._open = None
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
            self.settle(None)
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

    def settle(self, newest: Manifest | None) -> bool | None:
        """Decide about the open update by the newest manifest of the group; True if a version contains it.

        A receipt is only a promise: the aggregator may die, or its manifest lose to another. So the
        manifest decides, and the receipt only where the version made from this base was never seen.
        Returns None if no update is open.
        """
        if self._open is None:
            return None
        opened, self._open = self._open, None
        header, receipt = opened.submission.header, opened.receipt
        contained = self._contains(newest, header, receipt)
        if not contained and receipt and receipt.reason in SPOILT:
            self.residual.clear()
            return False
        delivered = decode_vector(opened.submission.payload, header.dtype)
        self.residual.settle(opened.sent, delivered, contained)
        return contained

    @staticmethod
    def _contains(newest: Manifest | None, header: UpdateHeader, receipt: Receipt | None) -> bool:
        if newest is None or newest.version <= header.base:
            return False
        if newest.version == header.base + 1:
            return any(
                update.digest == header.digest and update.verdict is Verdict.ACCEPTED
                for update in newest.updates
            )
        return receipt is not None and receipt.verdict is Verdict.ACCEPTED
