"""Nodes of a run whose outer step has momentum: it travels with the versions, whoever leads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spheroid_node.node.client import fetch_model
from spheroid_node.node.models import HopModels
from spheroid_node.node.versions import VersionStore
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.tensors import vector_digest

from .conftest import Peer, World
from .test_round import GROUP, peers, ranked, submission, until

ROUNDS = 5


@pytest.fixture
def run(run: RunSpec) -> RunSpec:
    """Exact updates, and no worker that a round clips."""
    training = run.training.model_copy(update={"outer": "nesterov", "outer_rate": 0.5})
    rule = run.round.model_copy(update={"compression": "float32", "aggregation": "mean"})
    return run.model_copy(update={"training": training, "round": rule})


async def play(world: World, members: list[Peer], round: int, value: float) -> str:
    """A round in which all members hand in ``value`` everywhere; returns who led it."""
    world.clock.now = 100.0 * round + 10.0
    before = members[0].store.newest(GROUP).version
    for peer in members:
        update = submission(peer, value, round)
        delivery = await peer.submitter.deliver(update, ranked(world, round), world.records)
        assert delivery is not None and delivery.receipt.verdict is Verdict.ACCEPTED
    leader = next(peer for peer in members if peer.id == ranked(world, round)[0])
    await until(lambda: GROUP in world.manifests and leader.store.newest(GROUP).version == before + 1)
    for peer in members:
        await until(lambda peer=peer: _caught_up(peer, before + 1))  # type: ignore[misc]
    return leader.id


async def _caught_up(peer: Peer, version: int) -> bool:
    return (await peer.sync.sync(GROUP)).version == version


async def test_momentum_goes_on_whoever_leads(world: World, tmp_path: Path) -> None:
    """Against torch.optim.SGD, which keeps it in one place; and a joiner, and a node that starts again."""
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        start = members[0].store.newest(GROUP).vector
        outside = torch.nn.Parameter(torch.from_numpy(start.copy()))
        optimiser = torch.optim.SGD([outside], lr=0.5, momentum=0.9, nesterov=True)
        leaders = set()
        for round in range(ROUNDS):
            value = (-1.0) ** round * (round + 1)
            leaders.add(await play(world, members, round, value))
            outside.grad = torch.full_like(outside, -value)
            optimiser.step()
            held = [peer.store.newest(GROUP) for peer in members]
            assert len({item.digest for item in held}) == 1
            np.testing.assert_allclose(held[0].vector, outside.detach().numpy(), rtol=1e-5, atol=1e-5)
        assert len(leaders) > 1, "another run id would choose other leaders: change the fixture's seed"

        newest = members[0].store.newest(GROUP)
        assert (len(newest.payload), newest.elements) == (2 * len(start), len(start))
        assert newest.digest == vector_digest(newest.payload) != vector_digest(newest.vector)
        momentum = optimiser.state[outside]["momentum_buffer"].numpy()
        np.testing.assert_allclose(newest.payload[len(start) :], -momentum, rtol=1e-5, atol=1e-5)

        # What a machine finds on its disk after a restart.
        again = VersionStore(world.run, lambda group: tmp_path / "0" / group)
        np.testing.assert_array_equal(again.newest(GROUP).payload, newest.payload)
        assert again.newest(GROUP).digest == newest.digest

        # A joiner has the momentum too, and may lead at once.
        for peer in members:
            peer.announce()
        async with peers(world, tmp_path / "joined", (0,)) as (joiner,):
            held = [await joiner.sync.sync(GROUP)]
            np.testing.assert_array_equal(held[0].payload, newest.payload)
            await members[0].sync.nodes(fresh=True)
            world.clock.now = 100.0 * ROUNDS + 10.0
            await joiner.submitter.deliver(submission(joiner, 1.0, ROUNDS), [joiner.id], world.records)
            world.clock.now = 100.0 * ROUNDS + 80.0
            await until(lambda: joiner.store.newest(GROUP).version == ROUNDS + 1)
            outside.grad = torch.full_like(outside, -1.0)
            optimiser.step()
            made = joiner.store.newest(GROUP)
            np.testing.assert_allclose(made.vector, outside.detach().numpy(), rtol=1e-5, atol=1e-5)

            # Who only reads takes the parameters.
            vectors, _ = await fetch_model(members[0].client)
            assert {group: len(vector) for group, vector in vectors.items()}[GROUP] == len(start)
            hop = HopModels(world.run, 0, joiner.store).hop_model(made.version, 0)
            assert hop is not None
            assert sum(p.numel() for p in hop.block.parameters()) == len(start)


async def test_the_momentum_of_a_fork_goes_with_the_version_that_won(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0)) as (one, two):
        records = dict(world.records)
        for peer, value in ((one, 1.0), (two, 5.0)):  # each thinks it is alone
            world.records.clear()
            world.records[peer.id] = records[peer.id]
            await peer.sync.nodes(fresh=True)
            await peer.submitter.deliver(submission(peer, value), [peer.id], world.records)
            await until(lambda peer=peer: peer.store.newest(GROUP).version == 1)  # type: ignore[misc]
        world.records.update(records)
        one.announce()
        two.announce()
        for peer in (one, two):
            await peer.sync.nodes(fresh=True)
            await peer.sync.sync(GROUP)
        first, second = one.store.newest(GROUP), two.store.newest(GROUP)
        assert first.digest == second.digest
        np.testing.assert_array_equal(first.payload, second.payload)
        learnt = first.payload[-1]
        assert learnt in (1.0, 5.0)
        before = first.vector.copy()
        await play(world, [one, two], 1, 2.0)
        velocity = 2.0 + 0.9 * learnt
        np.testing.assert_allclose(
            one.store.newest(GROUP).vector, before + 0.5 * (2.0 + 0.9 * velocity), rtol=1e-5
        )
