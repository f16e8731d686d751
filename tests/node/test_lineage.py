"""Whose versions are followed: a signature alone moves nobody's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from spheroid_node.node.history import LENGTH
from spheroid_node.node.versions import Held
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, UpdateOutcome
from spheroid_node.wire.tensors import Vector, vector_digest

from .conftest import MemoryDirectory, Peer, World
from .test_round import GROUP, peers, version

NOW = 9000.0


def made(signer: Peer, base: Held, vector: Vector, authors: list[Peer], **changes: Any) -> Held:
    """A version that ``signer`` makes of ``base``, from one update of each author."""
    norm = float(np.linalg.norm(vector - base.vector))
    outcomes = [
        UpdateOutcome(peer=author.id, digest=bytes(32), tokens=8, norm=norm, verdict=Verdict.ACCEPTED)
        for author in authors
    ]
    fields: dict[str, Any] = {
        "run": signer.world.run.run_id, "group": GROUP, "round": base.round + 1, "version": base.version + 1,
        "parent": base.digest, "digest": vector_digest(vector), "elements": len(vector), "rank": 0,
        "steps": base.steps + 1, "total": base.base.total + len(authors), "updates": outcomes,
    }  # fmt: skip
    manifest = Manifest(**(fields | changes))
    return Held.of(GROUP, manifest.version, vector, manifest.seal(signer.client.identity.key))


def forged(signer: Peer, base: Held, **changes: Any) -> Held:
    """A version of zeros."""
    return made(signer, base, np.zeros_like(base.vector), [signer], **changes)


async def offer(world: World, signer: Peer, held: Held) -> None:
    """Announce it, and hand it out to whoever asks."""
    signer.store.newest(GROUP)
    signer.store._held[GROUP][held.version] = held
    await MemoryDirectory(world, signer.id).publish_manifest(GROUP, held.sealed)


async def line_up(world: World, members: list[Peer], length: int) -> Held:
    """All hold the same versions."""
    for number in range(1, length + 1):
        held = version(world, number, members[0])
        for member in members:
            member.store.adopt(held)
    for member in members:
        member.announce()
    return members[0].store.newest(GROUP)


async def test_a_peer_of_another_block_makes_no_versions(world: World, tmp_path: Path) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 1)) as (one, two, stranger):
        held = await line_up(world, [one, two], 3)
        await offer(world, stranger, forged(stranger, held))
        with capture_logs() as logs:
            assert await one.sync.sync(GROUP) == held
            assert await one.sync.follow(stranger.id, forged(stranger, held).sealed) == held
        assert [entry["signer"] for entry in logs if entry["event"] == "version.not_believed"] == [
            stranger.id
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": bytes(32)},
        {"version": 60, "total": 70, "round": 70},
        {"total": 5},
        {"steps": 1000},
    ],
    ids=["another parent", "far ahead", "more updates than there were", "more steps than a round has"],
)
async def test_a_version_that_does_not_come_from_ours_is_not_followed(
    world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0)) as (one, two, hostile):
        held = await line_up(world, [one, two, hostile], 3)
        await offer(world, hostile, forged(hostile, held, **changes))
        assert (await one.sync.sync(GROUP)).digest == held.digest
        # What the others make is found behind it.
        following = version(world, 4, two)
        two.store.adopt(following)
        await MemoryDirectory(world, two.id).publish_manifest(GROUP, following.sealed)
        assert (await one.sync.sync(GROUP)).digest == following.digest


async def test_a_version_further_off_than_its_updates_reach_is_not_followed(
    world: World, tmp_path: Path
) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0)) as (one, hostile):
        held = await line_up(world, [one, hostile], 2)
        long = forged(hostile, held)
        assert long.manifest is not None
        [outcome] = long.manifest.updates
        brief = [outcome.model_copy(update={"norm": 0.9 * outcome.norm})]
        await offer(world, hostile, forged(hostile, held, updates=brief))
        assert await one.sync.sync(GROUP) == held
        await offer(world, hostile, long)
        assert (await one.sync.sync(GROUP)).digest == long.digest, "an aggregator is believed about its sum"


async def test_who_comes_late_believes_most_replicas(world: World, tmp_path: Path) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0, 0)) as (one, two, hostile, joiner):
        held = await line_up(world, [one, two, hostile], LENGTH + 9)
        behind = version(world, held.version + 1, one)
        one.store.adopt(behind)
        one.announce()  # two's record is a version behind
        await offer(world, hostile, forged(hostile, held, version=60, total=70, round=70))
        hostile.announce()
        assert (await joiner.sync.sync(GROUP)).digest == behind.digest


async def test_a_version_whose_aggregator_is_gone_is_taken_from_who_holds_it(
    world: World, tmp_path: Path
) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0)) as (one, two, gone):
        await line_up(world, [one, two, gone], 2)
        last = version(world, 3, gone)
        two.store.adopt(last)
        two.announce()
        del world.records[gone.id]
        await gone.server.stop()
        world.manifests[GROUP] = {gone.id: last.sealed}
        assert (await one.sync.sync(GROUP)).digest == last.digest


async def test_who_announces_what_nobody_hands_out_is_not_asked_for_ever(
    world: World, tmp_path: Path
) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0)) as (one, two, hostile):
        held = await line_up(world, [one, two, hostile], 2)
        causes = []
        for number in range(1, 6):
            nothing = made(hostile, held, held.vector + np.float32(number), [hostile])
            await MemoryDirectory(world, hostile.id).publish_manifest(GROUP, nothing.sealed)
            with capture_logs() as logs:
                assert await one.sync.sync(GROUP) == held
            causes += [entry["event"] for entry in logs if entry["event"].startswith("version.not_")]
        assert causes == ["version.not_fetched"] * 3 + ["version.not_believed"] * 2
        # Where another replica has it, it counts again.
        two.store.adopt(nothing)
        two.announce()
        await one.sync.nodes(fresh=True)
        one.sync._lineage._doubted.clear()  # else five seconds on
        assert (await one.sync.sync(GROUP)).digest == nothing.digest


async def test_a_true_version_is_followed_though_another_signs_its_digest_falsely(
    world: World, tmp_path: Path
) -> None:
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0)) as (one, two, hostile):
        await line_up(world, [one, two, hostile], 3)
        true = version(world, 4, two)
        assert true.manifest is not None
        false = true.manifest.model_copy(update={"total": 9}).seal(hostile.client.identity.key)
        await MemoryDirectory(world, hostile.id).publish_manifest(GROUP, false)
        two.store.adopt(true)
        await MemoryDirectory(world, two.id).publish_manifest(GROUP, true.sealed)
        assert (await one.sync.sync(GROUP)).digest == true.digest


async def test_a_false_manifest_in_between_is_passed_over(world: World, tmp_path: Path) -> None:
    """A hostile replica signs the parameters of version 2 once more, with other figures."""
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0)) as (one, two, *hostile):
        for number in range(1, 5):
            two.store.adopt(version(world, number, two))
        true = two.store.line(GROUP)[3]
        for liar in hostile:
            for number in range(1, 5):
                liar.store.adopt(version(world, number, two))
            false = true.model_copy(update={"total": 99}).seal(liar.client.identity.key)
            liar.store._held[GROUP][3] = Held.of(GROUP, 3, version(world, 3, two).vector, false)
        one.store.adopt(version(world, 1, two))
        for peer in (two, *hostile):
            peer.announce()
        last = two.store.newest(GROUP).manifest
        assert await one.sync._lineage.manifest(GROUP, 3, last, hostile[0].id) == true
        assert (await one.sync.sync(GROUP)).version == 4


async def test_made_up_signers_cost_one_look_at_the_records(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.clock.now = NOW
    looks = 0
    read = MemoryDirectory.all_nodes

    async def counted(self: MemoryDirectory, blocks: int) -> Any:
        nonlocal looks
        looks += 1
        return await read(self, blocks)

    async with peers(world, tmp_path, (0, 0)) as (one, two):
        held = await line_up(world, [one, two], 3)
        for number in range(20):
            stranger = Peer(world, 0, tmp_path / f"stranger-{number}")
            await MemoryDirectory(world, stranger.id).publish_manifest(GROUP, forged(stranger, held).sealed)
        await one.sync.nodes(fresh=True)
        monkeypatch.setattr(MemoryDirectory, "all_nodes", counted)
        assert await one.sync.sync(GROUP) == held
        assert looks == 1


async def test_who_was_cut_off_gives_way_though_its_version_is_higher(world: World, tmp_path: Path) -> None:
    """It lost no round, as it was alone; the others lost one, and more of them were at work."""
    world.clock.now = NOW
    async with peers(world, tmp_path, (0, 0, 0)) as (one, two, alone):
        common = await line_up(world, [one, two, alone], 2)
        swarm = made(one, common, common.vector + np.float32(0.5), [one, two])
        for peer in (one, two):
            peer.store.adopt(swarm)
        for round in (3, 4):
            base = alone.store.newest(GROUP)
            alone.store.adopt(made(alone, base, base.vector - np.float32(0.5), [alone], round=round))
        fork = alone.store.newest(GROUP)
        for peer in (one, two, alone):
            held = peer.store.newest(GROUP)
            await MemoryDirectory(world, peer.id).publish_manifest(GROUP, held.sealed)
            peer.announce()
        # As many updates: then the higher version counts.
        assert (swarm.version, swarm.base.total, fork.version, fork.base.total) == (3, 4, 4, 4)
        assert (await one.sync.sync(GROUP)).digest == fork.digest
        swarm = made(two, swarm, swarm.vector + np.float32(0.5), [one, two], round=5)
        two.store.adopt(swarm)
        two.announce()
        await MemoryDirectory(world, two.id).publish_manifest(GROUP, swarm.sealed)
        for number in (5, 6):
            base = alone.store.newest(GROUP)
            alone.store.adopt(made(alone, base, base.vector - np.float32(0.5), [alone], round=number + 1))
        fork = alone.store.newest(GROUP)
        assert (swarm.version, swarm.base.total, fork.version, fork.base.total) == (4, 6, 6, 6)
        swarm = made(two, swarm, swarm.vector + np.float32(0.5), [one, two], round=8)
        two.store.adopt(swarm)
        two.announce()
        await MemoryDirectory(world, two.id).publish_manifest(GROUP, swarm.sealed)
        for peer in (one, alone):
            assert (await peer.sync.sync(GROUP)).digest == swarm.digest
        assert alone.store.newest(GROUP).version < fork.version
