"""Nodes of a run whose blocks are cut into shards: rounds of their own, and one block at the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten
from spheroid_node.node.client import fetch_model
from spheroid_node.node.holdings import holding
from spheroid_node.node.models import HopModels
from spheroid_node.node.snapshot import snapshot_of
from spheroid_node.node.versions import VersionStore
from spheroid_node.rounds.election import candidates
from spheroid_node.run import LearningSpec, RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest

from .conftest import Peer, World
from .test_round import peers, submission, until
from .test_worker import quick, worked

SHARDS = 3
BLOCK = [f"block-0.{number}" for number in range(SHARDS)]

__all__ = ["quick"]


@pytest.fixture
def run(run: RunSpec) -> RunSpec:
    rule = run.round.model_copy(update={"shards": SHARDS, "compression": "float32", "aggregation": "mean"})
    return run.model_copy(update={"round": rule, "learning": LearningSpec(conditioning="context")})


async def play(world: World, members: list[Peer], round: int, value: float, lost: str = "") -> set[str]:
    """A round of all shards of block 0 but ``lost``; returns who led them."""
    world.clock.now = 100.0 * round + 10.0
    leaders = set()
    for group in BLOCK:
        if group == lost:
            continue
        before = members[0].store.newest(group).version
        ranked = candidates(world.run, group, round, [peer.id for peer in members])
        leaders.add(ranked[0])
        for peer in members:
            update = submission(peer, value, round, group=group)
            delivery = await peer.submitter.deliver(update, ranked, world.records)
            assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED
        for peer in members:
            await until(partial(_caught_up, peer, group, before + 1))
    for peer in members:
        peer.announce()
        await peer.sync.nodes(fresh=True)
    return leaders


async def _caught_up(peer: Peer, group: str, version: int) -> bool:
    return (await peer.sync.sync(group)).version == version


def learnt(peer: Peer, number: int) -> list[float]:
    """By shard, what the block has learnt at a version that the peer can serve."""
    hop = HopModels(peer.world.run, 0, peer.store).hop_model(number, 0)
    assert hop is not None
    moved = flatten(hop.block) - initial_vector(peer.world.run, "block-0")
    ends = np.cumsum([len(peer.store.newest(group).vector) for group in BLOCK])[:-1]
    return [float(part.mean().round(3)) for part in np.split(moved, ends)]


async def test_a_lost_shard_holds_its_block_up_for_a_round_and_no_longer(
    world: World, tmp_path: Path
) -> None:
    async with peers(world, tmp_path, (0, 0)) as members:
        assert len(await play(world, members, 0, 1.0)) == 1, "one peer leads all shards of few replicas"
        await play(world, members, 1, 1.0, lost=BLOCK[1])
        record = members[0].announced()
        assert (record.held[0].group, record.held[0].version, record.serves) == ("block-0", 1, 1)
        assert [holding(world.run, record, group).version for group in BLOCK] == [2, 1, 2]  # type: ignore[union-attr]
        assert all(learnt(peer, 1) == [1.0, 1.0, 1.0] for peer in members)
        assert HopModels(world.run, 0, members[0].store).hop_model(2, 0) is None

        await play(world, members, 2, 1.0)
        records = [peer.announced() for peer in members]
        assert len({record.held[0] for record in records}) == 1
        assert (records[0].held[0].version, records[0].serves) == (3, 3)
        for peer in members:
            assert [learnt(peer, number) for number in (3, 2, 1)] == [
                [3.0, 2.0, 3.0], [2.0, 1.0, 2.0], [1.0, 1.0, 1.0],
            ]  # fmt: skip

        # A machine that starts again serves the same from its disk.
        again = VersionStore(world.run, lambda group: tmp_path / "0" / group)
        whole = again.whole_behind("block-0", 0)
        assert whole is not None
        assert (whole.number, whole.digest) == (3, records[0].held[0].digest)

        manifests = {group: Manifest.unseal(members[0].store.newest(group).sealed)[1] for group in BLOCK}
        snapshot = snapshot_of(world.run, world.clock.now, world.records, manifests)
        assert [replica.version for replica in snapshot.replicas] == [3, 3]
        assert (snapshot.versions["block-0"].version, snapshot.versions["block-0"].accepted) == (3, 2)


async def test_a_joiner_and_a_client_get_what_the_others_serve(world: World, tmp_path: Path) -> None:
    """Also while a shard is behind: then they need older versions of the others."""
    async with peers(world, tmp_path, (0, 0)) as members:
        for round in range(3):
            await play(world, members, round, 1.0)
        await play(world, members, 3, 1.0, lost=BLOCK[2])
        served = members[0].announced()
        assert served.serves == 3
        async with peers(world, tmp_path / "joined", (0,)) as (joiner,):
            for group in BLOCK:
                await joiner.sync.sync(group)
            assert joiner.announced().held[0].group == "interface", "it cannot serve the block yet"
            whole = await joiner.sync.whole("block-0")
            assert whole is not None
            assert (whole.number, whole.digest) == (3, served.held[0].digest)
            assert joiner.announced().held == served.held
            assert learnt(joiner, 3) == learnt(members[0], 3) == [3.0, 3.0, 3.0]
        async with peers(world, tmp_path / "client", (1,)) as (client,):
            vectors, versions = await fetch_model(client.client)
            assert versions == {"block-0": 3, "block-1": 0, "interface": 0}
            moved = vectors["block-0"] - initial_vector(world.run, "block-0")
            np.testing.assert_allclose(moved, 3.0, rtol=1e-4)


async def test_many_replicas_elect_an_aggregator_of_each_shard(world: World, tmp_path: Path) -> None:
    world.run = world.run.model_copy(update={"round": world.run.round.model_copy(update={"shard_above": 2})})
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        leaders = [await play(world, members, round, 1.0) for round in range(3)]
        assert max(map(len, leaders)) > 1
        assert sum(peer.collector.led for peer in members) == 3 * SHARDS
        ranks = {
            Manifest.unseal(peer.store.newest(group).sealed)[1].rank for peer in members for group in BLOCK
        }
        assert ranks == {0}
        assert len({peer.announced().held[0].digest for peer in members}) == 1


async def test_a_worker_trains_all_shards_of_its_block(quick: World, tmp_path: Path) -> None:
    trainer, report, seen = await worked(quick, tmp_path, set(), 3, group="block-0.1")
    groups = quick.run.worker_groups(0)
    assert {group for group, version in trainer.loaded if version == 2} >= set(groups)
    rounds = [manifest.round for _, manifest in seen]
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds))), "a version in every round"
    assert report.verdicts[Verdict.ACCEPTED] >= 2 * len(groups)
