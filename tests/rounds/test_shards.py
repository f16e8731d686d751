from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.shards import Dated, at, numbers, settled
from spheroid_node.run import SHARD_PATIENCE


def history(*rounds: int, first: int = 0) -> list[Dated]:
    """Versions from number ``first`` on, made in these rounds."""
    return [Dated(first + index, round) for index, round in enumerate(rounds)]


def test_at_version_0_nothing_has_happened() -> None:
    histories = [history(-1), history(-1)]
    assert settled([-1, -1]) == 0
    assert (at(histories, 0), numbers(histories)) == ([0, 0], [0])
    assert at(histories, 1) is None


def test_a_shard_that_lost_a_round_is_waited_for_and_then_goes_on_beside_the_others() -> None:
    whole, lossy = history(-1, 4, 5, 6), history(-1, 4)
    assert settled([6, 4]) == 5
    assert at([whole, lossy], 5) == [1, 1]
    assert at([whole, lossy], 6) is None, "the other shard may still turn out to have a version of round 5"
    lossy = history(-1, 4, 6)
    assert numbers([whole, lossy]) == [7, 6, 5, 0]
    assert [at([whole, lossy], number) for number in (7, 6, 5, 0)] == [[3, 2], [2, 1], [1, 1], [0, 0]]


def test_one_that_stands_still_is_not_waited_for_for_ever() -> None:
    going, still = history(*range(-1, 12)), history(-1, 2)
    assert settled([11, 2]) == 12 - SHARD_PATIENCE
    assert at([going, still], 12 - SHARD_PATIENCE) == [12 - SHARD_PATIENCE, 1]
    assert at([going, still], 12) is None


def test_what_may_have_come_between_is_not_guessed() -> None:
    """A node that was away holds versions 3 and 6 of a shard, and nothing between."""
    gap = [Dated(3, 3), Dated(6, 6)]
    behind = history(3, 4, 5, first=3)
    assert settled([6, 5]) == 6
    assert at([gap, behind], 6) is None
    assert at([[*gap[:1], Dated(5, 5), gap[1]], behind], 6) == [5, 5]


@given(
    st.lists(st.sets(st.integers(0, 12), max_size=12), min_size=2, max_size=4),
    st.data(),
)
def test_all_who_serve_a_number_serve_the_same(made: list[set[int]], data: st.DataObject) -> None:
    """Whatever each has heard of, as long as no shard stands still: then the wait ends in a guess."""
    truth = [history(-1, *sorted(rounds)) for rounds in made]
    served: dict[int, list[int]] = {}
    for _ in range(4):
        known = []
        for versions in truth:
            newest = data.draw(st.integers(1, len(versions)))
            kept = data.draw(st.sets(st.sampled_from(versions[:newest]), max_size=newest))
            known.append(sorted({*kept, versions[newest - 1]}, key=lambda dated: dated.version))
        newest_rounds = [versions[-1].round for versions in known]
        if max(newest_rounds) - min(newest_rounds) > SHARD_PATIENCE:
            continue
        for number in range(15):
            if (found := at(known, number)) is not None:
                assert served.setdefault(number, found) == found


@pytest.mark.parametrize("number", [-1, 9])
def test_a_number_that_does_not_exist_yet(number: int) -> None:
    assert at([history(-1, 4), history(-1, 5)], number) is None
