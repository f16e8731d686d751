"""Where a node that lacks a version looks for it, and what it keeps of a fetch that broke off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spheroid_node.node import sync as sync_module
from spheroid_node.node.history import Signed
from spheroid_node.node.sync import Synchroniser

from .conftest import Peer, World
from .test_round import GROUP, peers, version


async def test_those_who_come_together_do_not_all_ask_the_same_holder(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0,) * 6) as members:
        joiner, aggregator = members[0], members[1]
        held = version(world, 1, aggregator)
        for member in members[1:]:
            member.store.adopt(held)
            member.announce()
        assert held.manifest is not None
        first = set()
        for _ in range(60):
            holders = await joiner.sync._holders(GROUP, held.manifest, aggregator.id)
            assert sorted(holder.peer for holder in holders) == sorted(m.id for m in members[1:])
            first.add(holders[0].peer)
        assert len(first) > 2


async def test_what_a_fetch_brought_is_kept_for_the_next_attempt(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is for the same version; and once that is held, nothing is kept."""
    world.clock.now = 900.0
    kept: list[Any] = []
    fetch_version = sync_module.fetch_version

    async def breaks_off(*arguments: Any, partial: Any, **options: Any) -> Any:
        kept.append(partial)
        if len(kept) < 4:
            raise OSError("all holders are gone")
        return await fetch_version(*arguments, partial=partial, **options)

    monkeypatch.setattr(sync_module, "fetch_version", breaks_off)
    async with peers(world, tmp_path, (0,)) as [one]:
        joiner = Peer(world, 1, tmp_path / "joiner")
        sync = Synchroniser(joiner.client, joiner.store, lambda group: tmp_path / "partial" / group)
        for number in (1, 1, 2, 2):
            one.store.adopt(version(world, number, one))
            one.announce()
            await sync.nodes(fresh=True)
            world.manifests.clear()  # else the one announced would be tried first, and then the newer one
            held = await sync.sync(GROUP)
        assert held.version == 2
    assert kept[0] is kept[1] and kept[2] is kept[3] and kept[1] is not kept[2]
    assert not sync._partials


async def test_a_manifest_that_was_missed_is_asked_of_others(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 0)) as (one, other):
        for number in (1, 2, 3):
            one.store.adopt(version(world, number, one))
        one.announce()
        other.store.adopt(version(world, 3, one))  # it was away for a while
        assert other.store.line(GROUP).keys() == {3}
        line = await other.sync.line(GROUP, {2, 4})
        assert line == {2: version(world, 2, one).manifest, 3: version(world, 3, one).manifest}
        # One that version 3 was not made from tells nothing of an update.
        one.store._held[GROUP][2] = version(world, 2, one, learnt=0.5)
        assert (await other.sync.line(GROUP, {2})).keys() == {3}


async def test_a_fork_that_lost_while_its_node_was_away_is_none_of_the_line(
    world: World, tmp_path: Path
) -> None:
    """It made a version that nobody saw, and missed those that the others made instead."""
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 0, 0)) as (one, other, late):
        made = [version(world, number, one) for number in range(1, 7)]
        lost = version(world, 2, late, learnt=0.5)
        for held in made:
            one.store.adopt(held)
        for held in (made[0], lost, made[5]):
            late.store.adopt(held)
        other.store.adopt(made[5])
        other.store._past[GROUP].follow([Signed(lost.manifest, lost.sealed)])
        for peer in (one, other):
            peer.announce()
        assert late.store.line(GROUP)[2] == lost.manifest, "nothing here says that it lost"
        line = await late.sync.line(GROUP, {2})
        assert line == {held.version: held.manifest for held in made[1:]}


async def test_a_manifest_outlives_its_version_with_others(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    async with peers(world, tmp_path, (0, 0)) as (one, other):
        made = [version(world, number, one) for number in range(1, 7)]
        for held in made:
            one.store.adopt(held)
        one.announce()
        other.store.adopt(made[-1])
        assert one.store.get(GROUP, 2) is None, "too old to be kept whole"
        assert (await other.sync.line(GROUP, {2}))[2] == made[1].manifest
        # Whoever wants its parameters is told that nobody has them.
        assert await other.sync._fetch_older(GROUP, 2, made[1].digest) is None


async def test_a_manifest_of_a_shard_is_asked_of_others_too(world: World, tmp_path: Path) -> None:
    world.clock.now = 900.0
    world.run = world.run.model_copy(
        update={"round": world.run.round.model_copy(update={"shards": 2, "shard_above": 1})}
    )
    async with peers(world, tmp_path, (0, 0)) as (one, other):
        shard = f"{GROUP}.1"
        made = [version(world, number, one, group=shard) for number in (1, 2, 3)]
        for held in made:
            one.store.adopt(held)
        one.announce()
        other.store.adopt(made[-1])
        assert (await other.sync.line(shard, {2})).keys() == {2, 3}
