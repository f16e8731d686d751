"""Writing by speculation, as block 0 leads it (design.md, section 7).

Block 0 guesses on, byte after byte, with its own head and the sampling noise of each place. Its states travel
down the chain in small pieces while it goes on guessing; the last hop judges them and tells block 0 and the
client what is final. Where a guess fails, block 0 takes the byte that the chain decided instead and begins a
new line from there. A line so costs one traversal of the chain, however many of its guesses hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from spheroid_node.serving.engine import Done
from spheroid_node.serving.pace import Pace
from spheroid_node.serving.states import joined
from spheroid_node.serving.steps import Piece, split
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Result, State, Write

Compute = Callable[[Piece], Awaitable[Done]]
Send = Callable[[State], Awaitable[None]]


class Writer:
    """One :class:`Write` of one session at block 0, of a chain with more hops than this."""

    def __init__(
        self,
        asked: Write,
        compute: Compute,
        send: Send,
        results: asyncio.Queue[Result],
        pace: Pace,
        *,
        step_limit: int,
        patience: float,
    ) -> None:
        self._asked, self._compute, self._send = asked, compute, send
        self._results, self._pace = results, pace
        self._step_limit, self._patience = step_limit, patience
        self._text = bytearray(asked.tokens)
        """Known bytes from ``asked.position`` on, then drafts."""
        self._decided = asked.position + len(asked.tokens)
        """Index of the first byte that is not final."""
        self._target = self._decided + asked.count
        self._line = 0
        self._pending: list[State] = []
        """Computed, of this line, and not yet sent."""

    async def run(self) -> None:
        """Until ``count`` bytes are decided. Raises :class:`WireError`, TimeoutError."""
        await self._prefill()
        while self._decided < self._target:
            while not self._results.empty():
                self._take(self._results.get_nowait())
            if self._may_draft():
                await self._draft()
            else:
                await self._flush()
                if self._decided < self._target and self._results.empty() and not self._may_draft():
                    async with asyncio.timeout(self._patience):
                        self._take(await self._results.get())

    # --- ahead ------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        """The position to be computed next: that of the newest byte, known or drafted."""
        return self._asked.position + len(self._text) - 1

    async def _prefill(self) -> None:
        for piece in split(Piece(self._asked.position, self._asked.tokens), self._step_limit):
            done = await self._compute(piece)
            await self._send(_onward(done))
        self._text.append(_draft(done))

    def _may_draft(self) -> bool:
        ahead = self._next - self._decided + 1
        # The position before the last wanted byte decides it; further ones decide nothing that is wanted.
        return self._next < self._target - 1 and ahead <= (self._asked.drafts or self._pace.depth)

    async def _draft(self) -> None:
        began = time.perf_counter()
        done = await self._compute(Piece(self._next, bytes(self._text[-1:]), line=self._line))
        self._pace.drafted(time.perf_counter() - began)
        self._pending.append(_onward(done))
        self._text.append(_draft(done))
        if len(self._pending) >= self._pace.piece:
            await self._flush()

    async def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            await self._send(joined(pending))

    # --- judged -----------------------------------------------------------------------------------

    def _take(self, result: Result) -> None:
        """What the last hop decided: drafts that hold, and perhaps a byte in place of one that does not."""
        if result.position != self._decided or self._decided + len(result.tokens) > self._target:
            raise WireError(ErrorCode.MALFORMED, "a result for another place")
        at = self._decided - self._asked.position
        drafts = self._text[at : at + len(result.tokens)]
        if len(drafts) < len(result.tokens):
            raise WireError(ErrorCode.MALFORMED, "a result for what was not asked")
        failed = drafts != result.tokens
        self._pace.judged(len(drafts) - failed, failed)
        self._pace.swept(result.seconds[1:])
        self._decided += len(result.tokens)
        if failed:
            if drafts[:-1] != result.tokens[:-1]:
                raise WireError(ErrorCode.MALFORMED, "a result that goes on after a draft that failed")
            self._text[at:] = result.tokens
            self._line += 1
            self._pending.clear()


def _onward(done: Done) -> State:
    assert done.onward is not None
    return done.onward


def _draft(done: Done) -> int:
    assert done.draft is not None
    return done.draft
