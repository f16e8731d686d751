from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.election import ranking

PEERS = [f"peer-{index}" for index in range(8)]
names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12)


@given(names, st.randoms(use_true_random=False))
def test_order_and_repetition_of_the_peers_do_not_matter(peers: list[str], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = peers * 2
    random.shuffle(shuffled)
    assert ranking("r", "g", 1, shuffled) == ranking("r", "g", 1, peers)
    assert sorted(ranking("r", "g", 1, peers)) == sorted(set(peers))


@given(names, st.integers(0, 11))
def test_a_peer_that_leaves_does_not_change_the_order_of_the_others(peers: list[str], index: int) -> None:
    gone = peers[index % len(peers)]
    before = [peer for peer in ranking("r", "g", 5, peers) if peer != gone]
    assert ranking("r", "g", 5, [peer for peer in peers if peer != gone]) == before


def test_run_group_and_round_each_change_the_ranking() -> None:
    orders = {
        tuple(ranking(run, group, round, PEERS)) for run in "ab" for group in "gh" for round in range(5)
    }
    assert len(orders) == 20


def test_everyone_leads_equally_often() -> None:
    rounds = 8000
    leaders = Counter(ranking("run", "block-0", round, PEERS)[0] for round in range(rounds))
    expected = rounds / len(PEERS)
    # χ² with 7 degrees of freedom exceeds 24.3 once in a thousand; nothing here is random.
    assert sum((leaders[peer] - expected) ** 2 / expected for peer in PEERS) < 24.3


def test_who_leads_now_says_nothing_about_who_leads_next() -> None:
    leaders = [ranking("run", "block-0", round, PEERS[:4])[0] for round in range(4000)]
    pairs = Counter(pairwise(leaders))
    assert len(pairs) == 16
    assert all(170 < count < 330 for count in pairs.values())


def test_the_ranking_is_part_of_the_protocol() -> None:
    """Another implementation must get the same: BLAKE2b-512 of the lines, highest first."""
    assert ranking("0123456789abcdef", "interface", 42, ["a", "b", "c", "d"]) == ["c", "a", "d", "b"]
