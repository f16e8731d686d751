"""What block 0 sends while it waits, and what it makes of the answer: the chain here knows the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from spheroid_node.serving.engine import Done
from spheroid_node.serving.judging import Judge
from spheroid_node.serving.pace import BRANCH_DRAFTS, Pace
from spheroid_node.serving.states import piece_of
from spheroid_node.serving.steps import Guess, Piece
from spheroid_node.serving.writing import Writer
from spheroid_node.wire.messages import Result, State, Write
from spheroid_node.wire.tensors import pack_tensor

TRUTH = b"The castle was on a hill above the old town, and nobody had lived there."
PROMPT = 4
ONE = pack_tensor(np.zeros((1, 2)))


class Results(asyncio.Queue[Result]):
    """Nothing is heard before block 0 waits for it, as on a long link."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self._chain = chain

    async def get(self) -> Result:
        for state in self._chain.under_way:
            self._chain.judged(state, self)
        self._chain.under_way.clear()
        return await super().get()


class Chain:
    """All hops after block 0, and block 0's own guesses: right but at the places of ``wrong``.

    There the byte after place p is guessed as wrong[p][0], and as wrong[p][1] if not that.
    """

    def __init__(self, wrong: Mapping[int, tuple[str, str, float]]) -> None:
        self._wrong = wrong
        self.judge, self.under_way, self.states = Judge(), list[State](), list[State]()
        self.final = bytearray(TRUTH[:PROMPT])
        self.lines: set[int] = set()

    async def compute(self, piece: Piece) -> Done:
        place = piece.end
        guess = Guess(TRUTH[min(place, len(TRUTH) - 1)], ord("!"), 5.0)
        if place in self._wrong:
            first, second, margin = self._wrong[place]
            guess = Guess(ord(first), ord(second), margin)
        state = State(
            session=bytes(16), position=piece.position, tokens=piece.tokens, masked=0, decide=piece.decide,
            line=piece.line, branch=piece.branch, after=piece.after, hidden=ONE, noisy=ONE, log_probs=None,
            seconds=[0.0],
        )  # fmt: skip
        return Done((0.0,), state, guess=guess)

    async def send(self, state: State) -> None:
        self.states.append(state)
        self.under_way.append(state)

    def judged(self, state: State, results: Results) -> None:
        piece = piece_of(state)
        if not piece.decide or not self.judge.due(piece):
            return
        first = piece.first_decided
        final = self.judge.judge(piece, TRUTH[first : first + piece.decide])
        self.lines.add(max(piece.line, 0))
        self.final[first:] = final
        results.put_nowait(
            Result(
                session=bytes(16),
                position=first,
                tokens=final,
                line=piece.line,
                logits=None,
                seconds=[0.0] * 3,
            )
        )


async def written(chain: Chain, drafts: int, branches: int | None, count: int) -> Chain:
    asked = Write(
        session=bytes(16), position=0, tokens=TRUTH[:PROMPT], count=count, drafts=drafts, branches=branches
    )
    writer = Writer(
        asked, chain.compute, chain.send, Results(chain), Pace(), step_limit=24, patience=5.0
    )  # fmt: skip
    async with asyncio.timeout(10):
        await writer.run()
    return chain


def of_branches(chain: Chain) -> list[tuple[int, bytes]]:
    return [(state.position, state.tokens[:1]) for state in chain.states if state.branch != state.after]


@pytest.mark.parametrize("count", [1, 2, 30, 60])
async def test_the_second_choice_saves_a_line(count: int) -> None:
    wrong = {10: ("x", chr(TRUTH[10]), 0.1), 40: ("x", chr(TRUTH[40]), 0.1)}
    alone = await written(Chain(wrong), 20, 0, count)
    branched = await written(Chain(wrong), 20, 2, count)
    for chain in (alone, branched):
        assert bytes(chain.final[: PROMPT + count]) == TRUTH[: PROMPT + count]
    assert len(branched.lines) == 1
    assert len(alone.lines) == 1 + sum(place < PROMPT + count - 1 for place in wrong)


async def test_branches_begin_where_block_0_is_least_sure_and_the_last_goes_first() -> None:
    wrong = {7: ("x", "y", 0.3), 9: ("x", "y", 0.1), 12: ("x", "y", 0.2)}
    chain = await written(Chain(wrong), 12, 2, 40)
    assert of_branches(chain)[:2] == [(12, b"y"), (9, b"y")]
    first = next(state for state in chain.states if state.branch == 1)
    assert (first.line, first.after, len(first.tokens)) == (0, 0, BRANCH_DRAFTS)


async def test_neither_choice_begins_a_new_line_from_the_decided_byte() -> None:
    chain = await written(Chain({9: ("x", "y", 0.1)}), 12, 3, 30)
    assert bytes(chain.final[: PROMPT + 30]) == TRUTH[: PROMPT + 30]
    assert chain.lines == {0, 1}


async def test_a_branch_goes_on_as_the_line_and_gets_branches_of_its_own() -> None:
    wrong = {9: ("x", chr(TRUTH[9]), 0.1), 25: ("x", chr(TRUTH[25]), 0.1)}
    chain = await written(Chain(wrong), 10, 1, 50)
    assert bytes(chain.final[: PROMPT + 50]) == TRUTH[: PROMPT + 50]
    assert chain.lines == {0}
    onto_a_branch = [state for state in chain.states if state.branch != state.after and state.after]
    assert onto_a_branch, "a branch of a branch"


async def test_what_branches_made_the_hops_forget_is_sent_again() -> None:
    """All drafts hold, so the line goes on although its branches have cut the caches."""
    chain = await written(Chain({}), 8, 2, 40)
    assert bytes(chain.final[: PROMPT + 40]) == TRUTH[: PROMPT + 40]
    held = bytearray()
    for state in chain.states:
        assert state.position <= len(held), "a gap in the caches of the hops"
        held[state.position :] = state.tokens
        if state.branch == state.after and state.decide:
            assert bytes(held) == TRUTH[: len(held)], "a line goes on with the caches of a branch"
    assert any(state.decide == 0 and state.line >= 0 for state in chain.states)
