"""Which block a node owns where its owner leaves that to it (``--block auto``)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Container, Mapping
from statistics import fmean
from typing import Literal

import structlog

from spheroid_node.errors import NoBlockFits
from spheroid_node.node.access import Client
from spheroid_node.run import RunSpec
from spheroid_node.training.device import free_memory, resolve_device, resolve_precision
from spheroid_node.wire.records import NodeRecord

log = structlog.get_logger()

LOPSIDED = 2.0
"""A block must be so many times as strong as another before one of its replicas goes there."""
LOOKS = 3
"""In a row that must show the same, so that a restart or a slow record moves nobody."""
LOOK_SECONDS = 60.0
SPREAD_SECONDS = 3.0
"""A joiner waits up to so long before it looks, so that several that start at once see each other."""


def blocks_that_fit(run: RunSpec, device: str, precision: str) -> frozenset[int]:
    """Blocks that this machine can train. Raises :class:`NoBlockFits`, and for a device that is not there."""
    from spheroid_node.training.plan import fitting_blocks, plan

    where = resolve_device(device)
    free = free_memory(where)
    if free is None:
        return frozenset(range(run.model.blocks))
    kind: Literal["cpu", "cuda"] = "cuda" if where.type == "cuda" else "cpu"
    mixed = resolve_precision(precision, where)
    found = fitting_blocks(run, kind, mixed, free)
    if not found:
        raise NoBlockFits(plan(run, 0, kind, mixed).total, free)
    return found


async def choose_block(client: Client, fitting: Container[int]) -> int:
    """The weakest block of ``fitting``; of several, any, so that joiners spread."""
    if nodes := await client.directory.all_nodes(client.run.model.blocks):
        await asyncio.sleep(random.uniform(0, SPREAD_SECONDS))
        nodes = await client.directory.all_nodes(client.run.model.blocks)
    return lacking_block(client.run, nodes, random.randrange(2**31), fitting)


def lacking_block(
    run: RunSpec, nodes: Mapping[str, NodeRecord], draw: int, fitting: Container[int] | None = None
) -> int:
    """Index of the weakest block; ``draw`` decides among equals."""
    strength = _strength(run, nodes)
    open_to_us = [block for block in range(run.model.blocks) if fitting is None or block in fitting]
    least = min(strength[block] for block in open_to_us)
    weakest = [block for block in open_to_us if strength[block] == least]
    return weakest[draw % len(weakest)]


def better_block(
    run: RunSpec, nodes: Mapping[str, NodeRecord], peer: str, fitting: Container[int] | None = None
) -> int | None:
    """Where ``peer`` would be worth more than where it is; None: it stays.

    Of a block that is :data:`LOPSIDED` times as strong as the weakest, the replica that came last goes, if
    that leaves its block no weaker than the other becomes. So no two go at once, and none goes back.
    """
    own = nodes.get(peer)
    if own is None or own.state != "online":
        return None
    replicas = {
        name: record
        for name, record in nodes.items()
        if record.block == own.block and record.state == "online"
    }
    if max(replicas, key=lambda name: (replicas[name].started, name)) != peer:
        return None
    strength, speed = _strength(run, nodes), _speeds(nodes)[peer]
    target = lacking_block(run, nodes, 0, fitting)
    here, there = strength[own.block], strength[target]
    if target == own.block or here < LOPSIDED * there or here - speed < there + speed:
        return None
    return target


class Placing:
    """Watches whether a node should own another block."""

    def __init__(self, client: Client, fitting: Container[int]) -> None:
        self._client, self._fitting = client, fitting

    async def run(self) -> int:
        """Returns that block, once it is clear; for ever if it never is."""
        run, wanted, looks = self._client.run, None, 0
        while looks < LOOKS:
            await asyncio.sleep(LOOK_SECONDS * random.uniform(0.7, 1.3))
            try:
                nodes = await self._client.directory.all_nodes(run.model.blocks)
            except OSError as error:
                log.debug("placing.unknown", cause=str(error))
                continue
            found = better_block(run, nodes, self._client.identity.peer, self._fitting)
            looks = looks + 1 if found is not None and found == wanted else int(found is not None)
            wanted = found
        assert wanted is not None
        return wanted


def _strength(run: RunSpec, nodes: Mapping[str, NodeRecord]) -> list[float]:
    """Tokens a second of all replicas of each block, those that come included and those that leave not."""
    strength, speeds = [0.0] * run.model.blocks, _speeds(nodes)
    for peer, record in nodes.items():
        if record.state != "leaving" and record.block < run.model.blocks:
            strength[record.block] += speeds[peer]
    return strength


def _speeds(nodes: Mapping[str, NodeRecord]) -> dict[str, float]:
    """Tokens a second; a node that has not trained yet counts as one like the others."""
    known = [record.tokens_per_second for record in nodes.values() if record.tokens_per_second > 0]
    usual = fmean(known) if known else 1.0
    return {peer: record.tokens_per_second or usual for peer, record in nodes.items()}
