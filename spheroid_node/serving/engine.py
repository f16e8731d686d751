"""One block's computation for all its sessions: what waits is computed together (continuous batching)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import structlog
import torch
from torch import Tensor

from spheroid_node.model.cache import BlockCache
from spheroid_node.model.composed import ChainState, Hop
from spheroid_node.run import RunSpec
from spheroid_node.serving.states import state_message, state_of
from spheroid_node.serving.steps import Guess, Part, Piece, advance, conclude, draft
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Open, State

log = structlog.get_logger()

BATCH_POSITIONS = 512
"""New positions that are computed together; a step has a window of them at most."""
BRIEF_SECONDS = 0.005
"""What the event loop itself may take to compute: less than waiting for another thread twice is worth."""


@dataclass(eq=False)
class Work:
    """One piece of one session. A session has one under way at a time."""

    opening: Open
    hop: Hop
    cache: BlockCache
    piece: Piece
    incoming: State | None
    """As it came from the hop before; None at block 0."""
    drafts: bool = False
    """Whether this block's own guess at the next byte is wanted."""
    done: asyncio.Future[Done] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class Done:
    """What came of a work."""

    seconds: tuple[float, ...]
    """Compute time of each hop so far, this one the last.

    What is computed together counts in full for each.
    """
    onward: State | None
    """For the next hop; None at the last."""
    decided: bytes = b""
    """At the last hop."""
    log_probs_NV: Tensor | None = None
    guess: Guess | None = None
    """At the place after the piece, where drafts are made."""


class Engine:
    """Computes in ``executor``, a single thread, so that neither the event loop nor another hop waits.

    First come, first served: a batch is what waits of one version, oldest first, up to ``BATCH_POSITIONS``.
    So no session waits for more than one step of every other. A session that is alone, with steps that are
    brief, is computed in the event loop: for it the way to another thread and back is most of the time.
    """

    def __init__(self, run: RunSpec, block: int, executor: Executor) -> None:
        self._run, self._block, self._executor = run, block, executor
        self._waiting: deque[Work] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._recent: deque[float] = deque(maxlen=64)
        self._alone: BlockCache | None = None
        """Of the text that all has been computed for lately."""
        self._last = 0.0, 1
        """Seconds and positions of its last step; 0 seconds if that is not known."""

    @property
    def position_seconds(self) -> float:
        """Median time of the last steps of one position; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    async def run(self, work: Work) -> Done:
        """Raises :class:`WireError` for what does not fit the run or cannot be computed."""
        if self._pump is None and self._is_brief(work):
            (outcome,) = self._compute([work])
            if isinstance(outcome, Done):
                return outcome
            raise outcome
        self._waiting.append(work)
        if self._pump is None:
            self._pump = asyncio.create_task(self._compute_all(), name="hop.compute")
        return await work.done

    def _is_brief(self, work: Work) -> bool:
        seconds, count = self._last
        # Fewer positions take hardly less: the weights have to be read all the same.
        expected = seconds * max(1.0, work.piece.count / count)
        return work.cache is self._alone and 0 < expected <= BRIEF_SECONDS

    async def _compute_all(self) -> None:
        batch: list[Work] = []
        try:
            while batch := self._next_batch():
                loop = asyncio.get_running_loop()
                outcomes = await loop.run_in_executor(self._executor, self._compute, batch)
                for work, outcome in zip(batch, outcomes, strict=True):
                    if work.done.done():  # its session has ended meanwhile
                        continue
                    if isinstance(outcome, Done):
                        work.done.set_result(outcome)
                    else:
                        work.done.set_exception(outcome)
        finally:
            self._pump = None
            for work in (*batch, *self._waiting):  # none, unless the executor is gone
                work.done.cancel()

    def _next_batch(self) -> list[Work]:
        batch: list[Work] = []
        positions, left = 0, deque[Work]()
        while self._waiting:
            work = self._waiting.popleft()
            if work.done.done():
                continue
            fits = not batch or (work.hop is batch[0].hop and positions + work.piece.count <= BATCH_POSITIONS)
            if fits:
                batch.append(work)
                positions += work.piece.count
            else:
                left.append(work)
        self._waiting = left
        return batch

    # --- in the worker thread, or in the event loop -------------------------------------------------

    def _compute(self, batch: Sequence[Work]) -> list[Done | Exception]:
        """An outcome for each work; what is wrong with one is its own outcome alone."""
        outcomes: dict[Work, Done | Exception] = {}
        parts: dict[Work, Part] = {}
        for work in batch:
            try:
                parts[work] = self._part(work)
            except WireError as error:
                outcomes[work] = error
        try:
            began = time.perf_counter()
            found = advance(batch[0].hop, list(parts.values())) if parts else []
            seconds = time.perf_counter() - began
            for work, (state, logits_BTV) in zip(parts, found, strict=True):
                outcomes[work] = self._outcome(work, state, logits_BTV, seconds)
            self._learn(batch, seconds)
        except Exception as error:
            log.exception("hop.failed", block=self._block)
            failure = WireError(ErrorCode.INTERNAL, type(error).__name__)
            outcomes |= {work: failure for work in parts if work not in outcomes}
        return [outcomes[work] for work in batch]

    def _learn(self, batch: Sequence[Work], seconds: float) -> None:
        lone = batch[0] if len(batch) == 1 else None
        self._last = 0.0, 1
        if lone is not None:
            if lone.cache is self._alone:
                self._last = seconds, lone.piece.count
            if lone.piece.count == 1:
                self._recent.append(seconds)
        self._alone = None if lone is None else lone.cache

    def _part(self, work: Work) -> Part:
        incoming = None if work.incoming is None else state_of(self._run, self._block, work.incoming)
        if work.piece.position < work.cache.oldest:
            raise WireError(ErrorCode.UNEXPECTED, f"position {work.piece.position} is no longer cached")
        return Part(work.piece, work.cache, incoming, work.opening.seed)

    def _outcome(self, work: Work, state: ChainState, logits_BTV: Tensor, seconds: float) -> Done:
        opening, piece = work.opening, work.piece
        before = [] if work.incoming is None else work.incoming.seconds
        spent = (*before, seconds)
        own = draft(piece, logits_BTV, opening.seed, opening.temperature) if work.drafts else None
        if opening.next is not None:
            onward = state_message(self._run, opening.session, piece, state, [*spent])
            return Done(spent, onward, guess=own)
        decided, log_probs_NV = conclude(
            work.hop, piece, state, logits_BTV, opening.seed, opening.temperature
        )
        return Done(spent, None, decided, log_probs_NV if opening.logits else None, own)


def for_serving(hop: Hop) -> Hop:
    """``hop`` ready for :class:`Engine`: in the precision that serving computes in, without gradients."""
    return hop.to(torch.float64).eval().requires_grad_(False)
