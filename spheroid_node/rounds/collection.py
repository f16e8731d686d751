"""An aggregator's view of one group in one round: which updates are accepted, and what each counts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from spheroid_node.rounds.aggregation import PayloadFacts
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import (
    MAX_UPDATES,
    MAX_UPDATES_NAMED,
    PREFIX_BYTES,
    Manifest,
    UpdateHeader,
    UpdateOutcome,
)
from spheroid_node.wire.tensors import Vector, encoded_size, vector_digest


@dataclass(frozen=True)
class Answer:
    """What an aggregator says to an update."""

    verdict: Verdict
    reason: Reason = Reason.NONE


ACCEPTED = Answer(Verdict.ACCEPTED)
LATE = Answer(Verdict.LATE, Reason.AFTER_DEADLINE)


@dataclass(frozen=True)
class Base:
    """The version that the updates of a round start from; ``norms`` are of the updates accepted into it, as
    far as its manifest names them."""

    version: int
    digest: bytes
    steps: int = 0
    norms: tuple[float, ...] = ()
    total: int = 0
    """Updates behind it."""

    @classmethod
    def initial(cls, payload: Vector) -> Base:
        """Version 0, which follows from the run's seed."""
        return cls(0, vector_digest(payload))

    @classmethod
    def of(cls, manifest: Manifest) -> Base:
        norms = tuple(update.norm for update in manifest.updates if update.verdict is Verdict.ACCEPTED)
        return cls(manifest.version, manifest.digest, manifest.steps, norms, manifest.total)


@dataclass(frozen=True)
class _Entry:
    """The newest thing known about an author's update; ``final`` once its payload was judged."""

    header: UpdateHeader
    answer: Answer
    norm: float
    scale: float = 1.0
    final: bool = False


class Collection:
    """Judges headers, then payloads. The first payload of an author counts; until then it may send again.

    So a worker whose connection broke, or whose header was refused, can mend that within the round.

    ``expected`` are the live replicas as this aggregator knows them; :meth:`expect` brings them up to date.
    """

    def __init__(
        self, run: RunSpec, group: str, round: int, base: Base, elements: int, expected: Iterable[str]
    ) -> None:
        self.run = run
        self.run_id = run.run_id
        self.group = group
        self.round = round
        self.base = base
        self.elements = elements
        self.deadline = Slots.of(run.round).deadline(round)
        self._live = frozenset(expected)
        self._eligible = set(self._live)
        self._pending: dict[str, UpdateHeader] = {}
        self._entries: dict[str, _Entry] = {}
        self._accepted: list[str] = []
        self._norms = sorted(norm for norm in base.norms if norm > 0)
        """Those that a limit is made of, of the base and of this round."""
        self._closed = False

    # --- what comes in ---

    def expect(self, live: Iterable[str]) -> None:
        """The live replicas now: who is new becomes eligible, who is gone is no longer waited for."""
        self._live = frozenset(live)
        self._eligible |= self._live

    def knows(self, author: str) -> bool:
        """False for an author whose record should be looked up before it is refused as not eligible."""
        return author in self._eligible

    def header(self, author: str, header: UpdateHeader, now: float) -> Answer | None:
        """Judge what ``author`` signed; None asks for the payload.

        The update of a judged payload gets its first answer again, also after τ: a worker that lost its
        receipt must not think that its update is lost too.
        """
        answer = self._misdirected(author, header)
        if answer is not None:
            return answer
        entry = self._entries.get(author)
        # All of it, nonce included: an update of the same content that was signed anew is another one.
        if entry and entry.final and header.round == self.round and entry.header == header:
            return entry.answer
        answer = self._timing(header, now) or self._unfit(header) or self._surplus(author, header)
        if answer is None:
            self._pending[author] = header
        elif not (entry and entry.final) and answer.reason is not Reason.DUPLICATE:
            self._entries[author] = _Entry(header, answer, header.norm)
        return answer

    def payload(self, author: str, facts: PayloadFacts, now: float) -> Answer:
        """Judge the payload of the header last let through; ACCEPTED makes it part of the version.

        Raises :class:`ValueError` if no header of ``author`` was let through.
        """
        header = self._pending.pop(author, None)
        if header is None:
            entry = self._entries.get(author)
            if entry is None or not entry.final:
                raise ValueError(f"payload of {author} without a header")
            return entry.answer
        answer = self._timing(header, now) or self._unsound(header, facts) or ACCEPTED
        norm = facts.norm if facts.finite else header.norm
        scale = self.scale_of(facts.norm) if answer is ACCEPTED else 1.0
        self._entries[author] = _Entry(header, answer, norm, scale, final=True)
        if answer is ACCEPTED:
            self._accepted.append(author)
            if norm > 0:
                insort(self._norms, norm)
        return answer

    def is_worth_trying(self, author: str, facts: PayloadFacts, now: float) -> bool:
        """Whether the run screens updates, and this payload would be accepted if it were not to fail that."""
        header = self._pending.get(author)
        if header is None or not self.run.round.screen:
            return False
        return self._timing(header, now) is None and self._unsound(header, facts) is None

    def withdraw(self, author: str) -> None:
        """An accepted update could not be added after all: as if it had never come."""
        norm = self._entries.pop(author).norm
        self._accepted.remove(author)
        if norm > 0:
            del self._norms[bisect_left(self._norms, norm)]

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """The version is being written; whatever comes now is late."""
        self._closed = True

    # --- what the round is ---

    def waiting_for(self) -> frozenset[str]:
        """Authors whose update of this round may still come."""
        heard = {author for author, entry in self._entries.items() if entry.header.round == self.round}
        return (self._live - heard) | frozenset(self._pending)

    def is_over(self, now: float) -> bool:
        """At τ, or once every live replica was heard."""
        return self._closed or now >= self.deadline or bool(self._live and not self.waiting_for())

    def weight(self, author: str) -> float:
        """Tokens, but no more than the run allows a worker to train in a round."""
        training = self.run.training
        most = training.local_steps * training.batch * self.run.model.window
        return float(min(self._entries[author].header.tokens, most))

    def scale(self, author: str) -> float:
        """The factor of an accepted update, as :meth:`scale_of` was when it came."""
        return self._entries[author].scale

    def scale_of(self, norm: float) -> float:
        """Factor ≤ 1 that brings an update of this norm down to ``clip_factor`` × the median norm.

        The median is of the norms known before this one: those behind the base version and those accepted
        earlier in this round. So an outlier has no say in its own limit. It is 1 unless the rule is
        ``clipped``, and where nothing is known: these updates are clipped at the end of their round.
        """
        if self.run.round.aggregation != "clipped" or not self._norms or norm == 0:
            return 1.0
        return min(1.0, self.run.round.clip_factor * median(self._norms) / norm)

    def outcomes(self) -> list[UpdateOutcome]:
        """Every update as the manifest names it, by peer id; if there are too many, the accepted first."""
        return [
            UpdateOutcome(
                peer=author,
                digest=entry.header.digest,
                tokens=entry.header.tokens,
                norm=entry.norm,
                verdict=entry.answer.verdict,
                reason=entry.answer.reason,
            )
            for author, entry in sorted(self._by_importance()[:MAX_UPDATES_NAMED])
        ]

    def also(self) -> bytes:
        """The accepted updates that are not among :meth:`outcomes`, as a manifest has them."""
        accepted = [
            entry.header.digest[:PREFIX_BYTES] for _, entry in self._by_importance() if _is_accepted(entry)
        ]
        # Of updates that are the same to the byte one entry tells all their workers.
        beside = set(accepted[MAX_UPDATES_NAMED:]) - set(accepted[:MAX_UPDATES_NAMED])
        return b"".join(sorted(beside))

    def accepted(self) -> list[str]:
        """Authors of the accepted updates, in the order of acceptance."""
        return list(self._accepted)

    def has_accepted(self, author: str) -> bool:
        """Whether an update of ``author`` is part of the version."""
        entry = self._entries.get(author)
        return entry is not None and entry.final and _is_accepted(entry)

    def steps(self) -> int:
        """Local steps behind the next version: the base's and the mean of the accepted updates'."""
        most = self.run.training.local_steps
        steps = [min(self._entries[author].header.steps, most) for author in self._accepted]
        return self.base.steps + (round(fmean(steps)) if steps else 0)

    def _by_importance(self) -> list[tuple[str, _Entry]]:
        """All that is known, by peer id, the accepted before the others."""
        return sorted(self._entries.items(), key=lambda item: (not _is_accepted(item[1]), item[0]))

    # --- the acceptance table, in the order in which it is applied ---

    def _misdirected(self, author: str, header: UpdateHeader) -> Answer | None:
        if header.run != self.run_id:
            return _refused(Reason.WRONG_RUN)
        if header.group != self.group:
            return _refused(Reason.WRONG_GROUP)
        if author not in self._eligible or not self.run.allows(author):
            return _refused(Reason.NOT_ELIGIBLE)
        return None

    def _timing(self, header: UpdateHeader, now: float) -> Answer | None:
        if header.round > self.round:
            return _refused(Reason.WRONG_ROUND)
        if header.round < self.round or now >= self.deadline or self._closed:
            return LATE
        return None

    def _unfit(self, header: UpdateHeader) -> Answer | None:
        if header.base != self.base.version or header.base_digest != self.base.digest:
            return _refused(Reason.STALE_BASE)
        if header.elements != self.elements:
            return _refused(Reason.BAD_SHAPE)
        if header.dtype != self.run.round.compression:
            return _refused(Reason.BAD_DTYPE)
        trained = header.steps * self.run.training.batch * self.run.model.window
        if not 0 < header.tokens <= trained:
            return _refused(Reason.BAD_WEIGHT)
        if header.norm > self.run.round.max_update_norm:
            return _refused(Reason.NORM_TOO_LARGE)
        return None

    def _surplus(self, author: str, header: UpdateHeader) -> Answer | None:
        entry = self._entries.get(author)
        if entry and entry.final:
            return _refused(Reason.DUPLICATE)
        return _refused(Reason.NO_ROOM) if self._is_full() else None

    def _unsound(self, header: UpdateHeader, facts: PayloadFacts) -> Answer | None:
        if facts.size != encoded_size(self.elements, header.dtype):
            return _refused(Reason.BAD_SHAPE)
        if facts.digest != header.digest:
            return _refused(Reason.BAD_DIGEST)
        if not facts.finite:
            return _refused(Reason.NOT_FINITE)
        if facts.norm > self.run.round.max_update_norm:
            return _refused(Reason.NORM_TOO_LARGE)
        if self._is_full():
            return _refused(Reason.NO_ROOM)
        # Not "above the limit": a NaN is not below it either.
        spoils = facts.worse_by is not None and not facts.worse_by <= self.run.round.screen
        return _refused(Reason.WORSE) if spoils else None

    def _is_full(self) -> bool:
        return len(self._accepted) >= MAX_UPDATES


def _is_accepted(entry: _Entry) -> bool:
    return entry.answer.verdict is Verdict.ACCEPTED


def _refused(reason: Reason) -> Answer:
    return Answer(Verdict.REFUSED, reason)
