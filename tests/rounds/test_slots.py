from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RoundSpec

slots = st.builds(
    Slots,
    genesis=st.floats(0, 2e9),
    period=st.floats(0.05, 1e5),
    settle=st.just(0.01),
)


def test_a_slot_trains_until_the_deadline_and_settles_until_its_end() -> None:
    s = Slots.of(RoundSpec(genesis=100.0, period=10.0, settle=2.0))
    assert (s.start(3), s.deadline(3), s.end(3)) == (130.0, 138.0, 140.0)


def test_before_genesis_there_is_no_round() -> None:
    s = Slots(100.0, 10.0, 2.0)
    assert [s.round_at(now) for now in (0.0, 89.0, 99.999, 100.0, 109.999, 110.0)] == [-1, -1, -1, 0, 0, 1]


@given(slots, st.integers(0, 10_000_000))
def test_a_round_begins_exactly_at_its_start(s: Slots, round: int) -> None:
    assert s.round_at(s.start(round)) == round


@given(slots, st.floats(0, 1e9))
def test_every_time_lies_in_the_slot_of_its_round(s: Slots, after: float) -> None:
    now = s.genesis + after
    round = s.round_at(now)
    assert s.start(round) <= now < s.end(round)
    assert s.start(round) < s.deadline(round) < s.end(round)
