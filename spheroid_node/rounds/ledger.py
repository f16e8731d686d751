"""A worker's last updates that were decided about, should a decision turn out to be wrong.

A worker decides by the manifests that it sees. A version may be announced after that, or lose to another, and
by then later updates carry on what was not taken, and may be in versions themselves. So of every update is
known how much of it is in each later one and in what the worker holds, and the ledger says what to add to
that: an update that a version contains is in the world once, one that none contains goes on with its worker,
and none is there more than once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from spheroid_node.wire.messages import Manifest, UpdateHeader
from spheroid_node.wire.tensors import Vector, decode_vector

LENGTH = 4
"""Updates that are remembered: a worker that leads its own fork for longer has lost what came before."""

NOTHING = 1e-9
"""Shares below it are rounding."""

Line = Mapping[int, Manifest]
"""By version, the manifests of a group that a worker follows and still has."""

Shares = Mapping[bytes, float]
"""How much of earlier updates, by digest, is in something."""


@dataclass(frozen=True)
class Submission:
    """A header still to be sealed, and the compressed update that it describes."""

    header: UpdateHeader
    payload: bytes

    def delivered(self) -> Vector:
        """As the aggregator decodes it."""
        return decode_vector(self.payload, self.header.dtype)


@dataclass(frozen=True)
class Settled:
    """An update, and what was taken to have become of it."""

    submission: Submission
    contained: bool
    held: float
    """How much of it is in what the worker holds; less than nothing where versions have too much of it."""
    parts: Shares = field(default_factory=dict)
    """How much of those before it is in it."""

    @property
    def digest(self) -> bytes:
        return self.submission.header.digest

    def contained_in(self, line: Line) -> bool:
        """Whether the version made from its base contains it; as before where that was not seen."""
        made = line.get(self.submission.header.base + 1)
        return self.contained if made is None else made.contains(self.digest)


Ledger = tuple[Settled, ...]
"""Oldest first."""


class Recount(NamedTuple):
    """What :func:`recount` found."""

    ledger: Ledger
    changed: list[Settled]
    """Updates that had been taken for the opposite, newest first."""
    change: Vector | None
    """What to add to what the worker holds."""


def shares(ledger: Ledger) -> Shares:
    """What is in an update that is made from what the worker holds now."""
    return {settled.digest: settled.held for settled in ledger if settled.held}


def settle(ledger: Ledger, submission: Submission, parts: Shares, contained: bool, decay: float) -> Ledger:
    """Note a decision: the worker holds the update less what was delivered, or all of it decayed."""
    older = [
        replace(
            settled,
            held=settled.held - parts.get(settled.digest, 0.0) if contained else decay * settled.held,
        )
        for settled in ledger
    ]
    newest = Settled(submission, contained, 0.0 if contained else decay, parts)
    return (*older, newest)[-LENGTH:]


def refuse(ledger: Ledger, submission: Submission, parts: Shares, kept: float) -> Ledger:
    """Note a refusal: of what the worker held before the update it holds the share ``kept`` now.

    One more is remembered then, as the worker may still hold something of the oldest.
    """
    older = (replace(settled, held=kept * settled.held) for settled in ledger)
    return (*older, Settled(submission, False, 0.0, parts))[-LENGTH - 1 :]


def held(ledger: Ledger, elements: int) -> Vector:
    """What the worker holds, but for what compression has rounded off.

    Newest first, as an update has its share of those before it. What is not finite is left out.
    """
    total = np.zeros(elements, dtype=np.float32)
    lacking = [settled.held for settled in ledger]
    with np.errstate(all="ignore"):
        for place in reversed(range(len(ledger))):
            if abs(lacking[place]) <= NOTHING:
                continue
            total += np.float32(lacking[place]) * ledger[place].submission.delivered()
            for other, older in enumerate(ledger[:place]):
                lacking[other] -= lacking[place] * ledger[place].parts.get(older.digest, 0.0)
    return np.where(np.isfinite(total), total, np.float32(0)).astype(np.float32, copy=False)


def recount(ledger: Ledger, line: Line, decay: float) -> Recount:
    """Decide again about all updates, newest first, as each correction changes what is held of older ones."""
    entries, changed, change = list(ledger), [], None
    for place in reversed(range(len(entries))):
        before = entries[place]
        contained = before.contained_in(line)
        amount = _correction(before, contained, entries[place + 1 :], decay)
        entries[place] = replace(before, contained=contained, held=before.held + amount)
        if contained != before.contained:
            changed.append(entries[place])
        if abs(amount) > NOTHING:
            for other, older in enumerate(entries[:place]):
                carried = amount * before.parts.get(older.digest, 0.0)
                entries[other] = replace(older, held=older.held + carried)
            added = np.float32(amount) * before.submission.delivered()
            change = added if change is None else change + added
    return Recount(tuple(entries), changed, change)


def _correction(update: Settled, contained: bool, later: Sequence[Settled], decay: float) -> float:
    """How much of the update to add to what is held: it shall be there once in all, or decayed.

    A later update that was refused, and is in a version all the same, holds what the worker has kept too.
    """
    inside = sum(other.parts.get(update.digest, 0.0) for other in later if other.contained)
    elsewhere = update.held + inside
    if contained:
        return -elsewhere
    return (decay if update.contained else min(elsewhere, 1.0)) - elsewhere
