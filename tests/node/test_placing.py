"""Where a node goes that may choose: to the weakest block, and not to and fro."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.errors import NoBlockFits
from spheroid_node.node import placing
from spheroid_node.node.access import Client
from spheroid_node.node.placing import Placing, better_block, blocks_that_fit, lacking_block
from spheroid_node.run import ModelSpec, RunSpec
from spheroid_node.wire.records import NodeRecord

RUN = RunSpec(name="places", model=ModelSpec(blocks=3, layers=1, width=16, heads=2, window=8))


def record(block: int, speed: float = 100.0, started: float = 0.0, state: str = "online") -> NodeRecord:
    return NodeRecord(
        run=RUN.run_id, block=block, state=state, host="127.0.0.1", port=1, device="cpu", started=started,
        round=0, held=[], serves=0, accepted=0, late=0, refused=0, led=0, tokens_per_second=speed,
        train_loss=None, from_noise_ce=None, bytes_in=0, bytes_out=0, sessions=0, hop_seconds=0.0,
        neighbours=[],
    )  # type: ignore[arg-type]  # fmt: skip


def swarm(*records: NodeRecord) -> dict[str, NodeRecord]:
    return {f"peer-{number}": one for number, one in enumerate(records)}


# --- joining ----------------------------------------------------------------------------------------


def test_the_weakest_block_is_taken() -> None:
    assert lacking_block(RUN, swarm(record(0), record(0), record(1)), 5) == 2
    assert lacking_block(RUN, swarm(record(0, 100), record(1, 30), record(1, 30), record(2, 90)), 0) == 1
    assert {lacking_block(RUN, {}, draw) for draw in range(9)} == {0, 1, 2}


def test_who_has_not_trained_counts_as_one_like_the_others_and_who_leaves_not_at_all() -> None:
    assert lacking_block(RUN, swarm(record(0, 0.0), record(1, 100), record(2, 300)), 0) == 1
    assert lacking_block(RUN, swarm(record(0, state="leaving"), record(1), record(2)), 0) == 0
    assert lacking_block(RUN, swarm(record(0, state="joining"), record(1)), 0) == 2


def test_only_what_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking_block(RUN, swarm(record(0), record(2)), 3, {0, 2}) in {0, 2}
    assert blocks_that_fit(RUN, "cpu", "float32") == {0, 1, 2}
    monkeypatch.setattr(placing, "free_memory", lambda device: 1000)
    with pytest.raises(NoBlockFits, match="GB to train"):
        blocks_that_fit(RUN, "cpu", "float32")
    monkeypatch.setattr(placing, "free_memory", lambda device: None)
    assert blocks_that_fit(RUN, "cpu", "float32") == {0, 1, 2}


def test_blocks_with_copies_of_others_need_more() -> None:
    from spheroid_node.training.plan import CPU_FACTOR, fitting_blocks, plan

    first, second = (CPU_FACTOR * plan(RUN, block, "cpu", False).total for block in (0, 1))
    assert first < second
    assert fitting_blocks(RUN, "cpu", False, int(first) + 1) == {0}


# --- moving -----------------------------------------------------------------------------------------


def test_the_one_that_came_last_goes_to_an_orphaned_block() -> None:
    nodes = swarm(record(0, started=1), record(0, started=2), record(1))
    assert [better_block(RUN, nodes, peer) for peer in nodes] == [None, 2, None]
    assert better_block(RUN, nodes, "peer-1", {0, 1}) is None
    assert better_block(RUN, nodes, "somebody else") is None


def test_nobody_leaves_a_block_alone() -> None:
    nodes = swarm(record(0), record(1))
    assert [better_block(RUN, nodes, peer) for peer in nodes] == [None, None]


@pytest.mark.parametrize(
    ("speeds", "moves"),
    [
        (([100, 100], [100], [100]), False),  # twice as strong, but then the other would be
        (([100, 100, 100], [100], [100]), True),
        (([400, 30], [100], [200]), True),
        (([100, 400], [100], [200]), False),  # it takes more along than it leaves
        (([100, 90], [100], [100]), False),
    ],
)
def test_a_lopsided_swarm_is_evened_out(speeds: tuple[list[float], ...], moves: bool) -> None:
    records = [
        record(block, speed, started=number)
        for block, of_block in enumerate(speeds)
        for number, speed in enumerate(of_block)
    ]
    nodes = swarm(*records)
    assert (better_block(RUN, nodes, f"peer-{len(speeds[0]) - 1}") is not None) is moves


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0.0, 50.0, 100.0, 400.0])), min_size=1, max_size=12
    )
)
def test_moving_comes_to_an_end_and_no_block_is_left(places: list[tuple[int, float]]) -> None:
    nodes = swarm(*(record(block, speed, started=n) for n, (block, speed) in enumerate(places)))
    held = {one.block for one in nodes.values()}
    for _ in range(50):
        moves = {peer: better_block(RUN, nodes, peer) for peer in nodes}
        going = {peer: block for peer, block in moves.items() if block is not None}
        if not going:
            break
        assert len({nodes[peer].block for peer in going}) == len(going), "one of a block at a time"
        peer, block = next(iter(going.items()))
        nodes[peer] = nodes[peer].model_copy(update={"block": block, "started": 1000.0})
        now_held = {one.block for one in nodes.values()}
        assert held <= now_held
        held = now_held
    else:
        raise AssertionError("it goes on for ever")


async def test_it_takes_several_looks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "LOOK_SECONDS", 0.001)
    lopsided = swarm(record(0, started=1), record(0, started=2), record(1))
    even = swarm(record(0), record(2), record(1))
    seen = [lopsided, lopsided, even, OSError("no answer"), lopsided, lopsided, lopsided]

    class Directory:
        looks = 0

        async def all_nodes(self, blocks: int) -> dict[str, NodeRecord]:
            found = seen[self.looks]
            self.looks += 1
            if isinstance(found, OSError):
                raise found
            return found

    class Somebody:
        peer = "peer-1"

    directory = Directory()
    client = Client(cast(Any, None), RUN, cast(Any, directory), cast(Any, Somebody()))
    async with asyncio.timeout(10):
        assert await Placing(client, {0, 1, 2}).run() == 2
    assert directory.looks == len(seen)
