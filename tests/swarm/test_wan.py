"""A node that others reach through another port than the one it listens on, over a link that has a delay."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from benchmarks.wan import Wan
from spheroid_node.config import LOOPBACK
from spheroid_node.net.ports import free_port

from .conftest import Node, Swarm, wait_for


@pytest.mark.timeout(400)
async def test_a_node_behind_a_router_takes_its_turn_at_leading(swarm: Swarm) -> None:
    listened_on = free_port(LOOPBACK, 0, "--data-port")
    async with Wan(delay=0.02, jitter=0.005) as wan:
        announced = await wan.forward(LOOPBACK, listened_on)
        ports = ("--data-port", str(listened_on), "--announce-data-port", str(announced))
        node = swarm.join(0, "behind-a-router", *ports)
        swarm.nodes.remove(node)
        try:
            started = await asyncio.to_thread(node.wait_for, "node.started")
            assert started["data_port"] == listened_on
            await asyncio.to_thread(wait_for, "updates of others", lambda: led_others(node))
            # They dialled what it announced: there is no other way to it.
            assert wan.there.carried > 0
            assert wan.back.carried > 0
        finally:
            os.killpg(node.pid, signal.SIGKILL)


def led_others(node: Node) -> bool | None:
    """Whether it was the aggregator of an update besides its own."""
    return any(event["accepted"] > 1 for event in node.events("round.led")) or None
