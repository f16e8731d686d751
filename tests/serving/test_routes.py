"""Which replicas and versions a client picks."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from spheroid_node.errors import BlockWithoutReplica, ChainFailed
from spheroid_node.run import INTERFACE_GROUP, RunSpec
from spheroid_node.serving.routes import Avoid, Delay, Versions, choose_route, delays_between
from spheroid_node.wire.records import HeldVersion, Neighbour, NodeRecord
from tests.serving.memory import held, node_record, small_model

RUN = small_model(blocks=2).run


def versions(block: int, *pairs: tuple[int, int]) -> list[HeldVersion]:
    return [
        version
        for own, interface in pairs
        for version in (held(f"block-{block}", own), held(INTERFACE_GROUP, interface))
    ]


def peers(records: list[dict[str, NodeRecord]], **options: object) -> list[str]:
    return [hop.address.peer for hop in choose_route(RUN, records, **options).hops]  # type: ignore[arg-type]


def test_the_quickest_replica_is_chosen_by_what_a_session_would_get() -> None:
    records = [
        {
            "fast but full": node_record(RUN, 0, hop_seconds=0.01, sessions=9),
            "free": node_record(RUN, 0, hop_seconds=0.05, sessions=0),
            "slow": node_record(RUN, 0, hop_seconds=0.09, sessions=0),
        },
        {"only": node_record(RUN, 1)},
    ]
    assert peers(records) == ["free", "only"]
    avoid = Avoid(now=5.0)
    avoid.blame("free")
    assert peers(records, avoid=avoid) == ["slow", "only"]


def test_between_equals_clients_spread() -> None:
    records = [{name: node_record(RUN, 0) for name in "abc"}, {"only": node_record(RUN, 1)}]
    rng = random.Random(0)
    assert {peers(records, rng=rng)[0] for _ in range(50)} == set("abc")


@pytest.mark.parametrize("state", ["joining", "leaving"])
def test_only_nodes_that_are_online_serve(state: str) -> None:
    records = [{"a": node_record(RUN, 0)}, {"b": node_record(RUN, 1, state=state)}]
    with pytest.raises(BlockWithoutReplica, match="block 1"):
        choose_route(RUN, records)


def test_the_newest_interface_that_all_blocks_have() -> None:
    records = [
        {"a": node_record(RUN, 0, held=versions(0, (4, 8), (3, 7)))},
        {"b": node_record(RUN, 1, held=versions(1, (5, 7), (6, 6)))},
    ]
    route = choose_route(RUN, records)
    assert route.interface == 7
    assert [hop.version for hop in route.hops] == [4, 6]


def test_the_newest_version_of_a_block_goes_before_the_quickest_replica() -> None:
    records = [
        {
            "new": node_record(RUN, 0, held=versions(0, (4, 7)), hop_seconds=9.0),
            "old": node_record(RUN, 0, held=versions(0, (3, 7)), hop_seconds=0.1),
        },
        {"b": node_record(RUN, 1)},
    ]
    assert peers(records) == ["new", "b"]
    assert peers(records, avoid=Avoid(versions={("new", 4, 7)})) == ["old", "b"]


def test_versions_of_one_number_but_other_bytes_are_not_mixed() -> None:
    fork = [held("block-1", 3), held(INTERFACE_GROUP, 7, bytes([1] * 32))]
    records = [{"a": node_record(RUN, 0)}, {"b": node_record(RUN, 1, held=fork)}]
    with pytest.raises(ChainFailed, match="in common"):
        choose_route(RUN, records)


def test_a_frozen_interface_needs_no_version() -> None:
    run = RunSpec(**RUN.model_dump() | {"interface": "frozen"})
    records = [{"ab"[block]: node_record(run, block, held=[held(f"block-{block}", 2)])} for block in (0, 1)]
    route = choose_route(run, records)
    assert (route.interface, [hop.version for hop in route.hops]) == (0, [2, 2])


def route(records: list[dict[str, NodeRecord]], own: dict[str, float], run: RunSpec) -> str:
    chosen = choose_route(run, records, delay=delays_between(records, own))
    return "".join(hop.address.peer for hop in chosen.hops)


def near(**seconds: float) -> list[Neighbour]:
    return [Neighbour(peer=peer, seconds=way) for peer, way in seconds.items()]


def test_the_shortest_way_round_is_taken_and_not_the_nearest_neighbour() -> None:
    """Against trying every way there is."""
    run, rng = small_model(blocks=3).run, random.Random(1)
    for _ in range(30):
        records = [
            {
                peer: node_record(
                    run,
                    block,
                    hop_seconds=rng.uniform(0, 0.05),
                    sessions=rng.randrange(3),
                    neighbours=near(**{after: rng.uniform(0, 0.2) for after in following}),
                )
                for peer in own
            }
            for block, (own, following) in enumerate([("abc", "def"), ("def", "ghi"), ("ghi", "abc")])
        ]
        distances = {peer: rng.uniform(0, 0.2) for peer in "abcghi"}
        way = delays_between(records, distances)

        def cost(hops: tuple[str, ...], way: Delay = way, records: Any = records) -> float:
            ring = zip(("", *hops), hops, strict=False)
            back = max(way(hops[-1], ""), way(hops[-1], hops[0]))
            own = [records[block][peer] for block, peer in enumerate(hops)]
            compute = sum((record.hop_seconds + 1e-6) * (1 + record.sessions) for record in own)
            return compute + back + sum(way(*step) for step in ring)

        best = min(product("abc", "def", "ghi"), key=cost)
        assert route(records, distances, run) == "".join(best)


def test_a_way_that_nobody_has_measured_is_neither_sought_nor_shunned() -> None:
    records = [
        {"a": node_record(RUN, 0, neighbours=near(near=0.01, far=0.3)), "b": node_record(RUN, 0)},
        {"near": node_record(RUN, 1), "far": node_record(RUN, 1), "new": node_record(RUN, 1)},
    ]
    delay = delays_between(records, {"a": 0.02})
    assert delay("a", "near") == 0.01 and delay("", "a") == delay("a", "") == 0.02
    assert delay("a", "new") == delay("b", "far") == pytest.approx((0.01 + 0.3 + 0.02 + 0.02) / 4)
    assert delay("a", "a") == 0
    assert delays_between([{}, {}], {})("a", "b") == 0


def test_what_failed_is_left_alone_for_longer_and_longer() -> None:
    avoid, pauses = Avoid(), []
    for _ in range(9):
        avoid.blame("a")
        until = avoid.peers["a"][0]
        pauses.append(until - avoid.now)
        assert avoid.leaves_out("a") and not avoid.leaves_out("b")
        avoid.now = until
        assert not avoid.leaves_out("a")
    assert pauses[:3] == [5, 10, 20] and pauses[-1] == 300


def test_pinned_versions_are_kept_while_they_may_be_held() -> None:
    pinned = Versions(7, (3, 3))

    def records(newest: int) -> list[dict[str, NodeRecord]]:
        pairs = (newest, newest + 4)
        return [{"a": node_record(RUN, 0, held=versions(0, pairs))},
                {"b": node_record(RUN, 1, held=versions(1, pairs))}]  # fmt: skip

    for newest in range(3, 3 + RUN.kept_versions):
        assert choose_route(RUN, records(newest), pinned=pinned).versions == pinned
    gone = 3 + RUN.kept_versions
    assert choose_route(RUN, records(gone), pinned=pinned).versions == Versions(gone + 4, (gone, gone))
    avoid = Avoid(versions={("a", 3, 7)})
    assert choose_route(RUN, records(4), avoid, pinned=pinned).versions == Versions(8, (4, 4))
