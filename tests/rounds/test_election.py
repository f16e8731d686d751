from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.election import candidates, ranking
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec

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


def test_few_replicas_elect_one_leader_of_all_shards_and_many_one_of_each() -> None:
    run = RunSpec(
        name="cut",
        model=ModelSpec(blocks=2, layers=1, width=16, heads=2, window=8),
        round=RoundSpec(shards=8, shard_above=5),
    )
    few, many, groups = PEERS[:5], PEERS[:6], run.shards_of("block-1")
    for round in range(20):
        whole = ranking(run.run_id, "block-1", round, few)
        assert all(candidates(run, group, round, few) == whole for group in groups)
        assert all(candidates(run, group, round, [*few, few[0]]) == whole for group in groups)
        apart = [candidates(run, group, round, many) for group in groups]
        assert apart == [ranking(run.run_id, group, round, many) for group in groups]
        assert len({ranked[0] for ranked in apart}) > 1
    uncut = run.model_copy(update={"round": RoundSpec(shard_above=1)})
    assert candidates(uncut, "block-1", 3, many) == ranking(uncut.run_id, "block-1", 3, many)
