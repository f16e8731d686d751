"""Writing by speculation, as block 0 leads it (design.md, section 7).

Block 0 guesses on, byte after byte, with its own head and the sampling noise of each place. Its states travel
down the chain in small pieces while it goes on guessing; the last hop judges them and tells block 0 and the
client what is final. Where a guess fails, block 0 takes the byte that the chain decided instead and begins a
new line from there. A line so costs one traversal of the chain, however many of its guesses hold.

Once a line is as far ahead as is worth it, block 0 has nothing to do until it hears of it. In that time it
sends branches after it: where it was least sure, what would follow if the byte were its second choice. Where
the chain decides just that, the line goes on with the branch, and no traversal is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spheroid_node.serving.engine import Done
from spheroid_node.serving.pace import BRANCH_DRAFTS, Pace
from spheroid_node.serving.states import joined
from spheroid_node.serving.steps import Guess, Piece, split
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Result, State, Write

Compute = Callable[[Piece], Awaitable[Done]]
Send = Callable[[State], Awaitable[None]]


@dataclass(frozen=True)
class _Branch:
    """What was sent in case the byte at a place is another than the line's."""

    number: int
    drafts: bytes
    """After that byte; the last of them has been guessed, but its position is not computed."""


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
        self._held = bytearray()
        """The bytes whose positions the hops' caches hold, from ``asked.position`` on."""
        self._decided = asked.position + len(asked.tokens)
        """Index of the first byte that is not final."""
        self._target = self._decided + asked.count
        self._line = self._branch = self._newest_branch = 0
        self._pending: list[State] = []
        """Computed, of this line, and not yet sent."""
        self._guesses: dict[int, Guess] = {}
        """Of the drafts of this line that no branch has been sent for, by the index of the byte."""
        self._branches: dict[tuple[int, int], _Branch] = {}
        """Sent after this line, by index and byte that they begin with."""

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
                if self._decided < self._target and not self._heard():
                    await self._wait()

    async def _wait(self) -> None:
        """Until there is a result. With branches, where there is time for them."""
        began = time.perf_counter()
        await self._send_branches()
        if self._results.empty():
            async with asyncio.timeout(self._patience):
                result = await self._results.get()
        else:
            result = self._results.get_nowait()
        self._pace.waited(time.perf_counter() - began)
        self._take(result)

    def _heard(self) -> bool:
        return not self._results.empty() or self._may_draft()

    # --- ahead ------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        """The position to be computed next: that of the newest byte, known or drafted."""
        return self._asked.position + len(self._text) - 1

    async def _prefill(self) -> None:
        for piece in split(Piece(self._asked.position, self._asked.tokens), self._step_limit):
            done = await self._computed(piece)
            await self._send(_onward(done))
        self._extend(_guess(done))

    def _may_draft(self) -> bool:
        ahead = self._next - self._decided + 1
        # The position before the last wanted byte decides it; further ones decide nothing that is wanted.
        return self._next < self._target - 1 and ahead <= (self._asked.drafts or self._pace.depth)

    async def _draft(self) -> None:
        await self._mend()
        began = time.perf_counter()
        piece = Piece(
            self._next, bytes(self._text[-1:]), line=self._line, branch=self._branch, after=self._branch
        )
        done = await self._computed(piece)
        self._pace.drafted(time.perf_counter() - began)
        self._pending.append(_onward(done))
        self._extend(_guess(done))
        if len(self._pending) >= self._pace.piece:
            await self._flush()

    def _extend(self, guess: Guess) -> None:
        self._text.append(guess.byte)
        self._guesses[self._next] = guess

    async def _computed(self, piece: Piece) -> Done:
        start = piece.position - self._asked.position
        self._held[start:] = piece.tokens
        return await self._compute(piece)

    async def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            await self._send(joined(pending))

    # --- aside ------------------------------------------------------------------------------------

    async def _send_branches(self) -> None:
        """From the last to the first, so that each finds the caches as far as it needs them."""
        if self._held != self._text[:-1]:  # branches have been sent and nothing was drafted since
            return
        wanted = self._pace.branches if self._asked.branches is None else self._asked.branches
        open_ones = [index for index in self._guesses if self._decided <= index < self._target - 1]
        unsure = sorted(open_ones, key=lambda index: self._guesses[index].margin)[:wanted]
        for index in sorted(unsure, reverse=True):
            if self._asked.branches is None and not self._results.empty():
                return
            await self._send_branch(index, self._guesses.pop(index).second)

    async def _send_branch(self, index: int, byte: int) -> None:
        self._newest_branch += 1
        states, tokens = [], bytes([byte])
        for position in range(index, min(index + BRANCH_DRAFTS, self._target - 1)):
            piece = Piece(
                position, tokens[-1:], line=self._line, branch=self._newest_branch, after=self._branch
            )
            done = await self._computed(piece)
            states.append(_onward(done))
            tokens += bytes([_guess(done).byte])
        await self._send(joined(states))
        self._branches[index, byte] = _Branch(self._newest_branch, tokens[1:])

    async def _mend(self) -> None:
        """Have the hops compute again what branches made them forget of this line."""
        known = bytes(self._text[:-1])
        if self._held[: len(known)] == known:
            return
        agree = next(i for i, byte in enumerate(known) if self._held[i : i + 1] != bytes([byte]))
        start = self._asked.position + agree
        piece = Piece(start, known[agree:], 0, 0, self._line, self._branch, self._branch)
        for part in split(piece, self._step_limit):
            await self._send(_onward(await self._computed(part)))

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
            self._turn(at, result.tokens)

    def _turn(self, at: int, tokens: bytes) -> None:
        """Go on after ``tokens``, the last of which is not the line's: with a branch, or with a new line."""
        branch = self._branches.get((self._decided - 1, tokens[-1]))
        self._text[at:] = tokens
        if branch is not None:
            self._branch = branch.number
            self._text += branch.drafts
        else:
            self._line, self._branch = self._line + 1, 0
        self._pending.clear()
        self._branches.clear()
        self._guesses.clear()


def _onward(done: Done) -> State:
    assert done.onward is not None
    return done.onward


def _guess(done: Done) -> Guess:
    assert done.guess is not None
    return done.guess
