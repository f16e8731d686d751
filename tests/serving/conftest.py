"""Fixtures of the swarm in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spheroid_node.model.composed import ComposedModel
from spheroid_node.serving.sessions import Limits
from tests.serving.memory import MakeSwarm, Swarm, small_model


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


@pytest.fixture
async def make_swarm(executor: ThreadPoolExecutor) -> AsyncIterator[MakeSwarm]:
    """Makes swarms of one replica a block, named hop-0, hop-1 …"""
    swarms: list[Swarm] = []

    def make(model: ComposedModel | None = None, limits: Limits | None = None) -> Swarm:
        swarm = Swarm(model or small_model(), executor)
        for block in range(swarm.run.model.blocks):
            swarm.add(block, f"hop-{block}", limits)
        swarms.append(swarm)
        return swarm

    yield make
    nodes = [node for swarm in swarms for node in swarm.network.nodes.values()]
    await asyncio.gather(*(node.vanish() for node in nodes))
