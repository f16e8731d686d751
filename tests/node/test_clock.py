"""Waiting for a moment of a clock that people set."""

from __future__ import annotations

import asyncio

import pytest

from spheroid_node.node import clock
from spheroid_node.node.clock import sleep_until


@pytest.mark.parametrize("change", [0.0, 3600.0, -3600.0])
async def test_a_wait_ends_at_its_moment_or_when_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, change: float
) -> None:
    monkeypatch.setattr(clock, "LONGEST_NAP", 0.01)
    loop, offset = asyncio.get_running_loop(), 0.0
    moment = loop.time() + (0.05 if change == 0 else 600.0)
    waiting = asyncio.create_task(sleep_until(lambda: loop.time() + offset, moment))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    offset = change
    await asyncio.wait_for(waiting, 5)
