"""Which replicas and versions a client picks."""

from __future__ import annotations

import random

import pytest

from spheroid_node.errors import BlockWithoutReplica, ChainFailed
from spheroid_node.run import INTERFACE_GROUP, RunSpec
from spheroid_node.serving.routes import Avoid, choose_route
from spheroid_node.wire.records import HeldVersion, NodeRecord
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
