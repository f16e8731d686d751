"""Waiting for a moment of DHT time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST_NAP = 1.0
"""An event loop's clock stands still while a machine sleeps and DHT time goes on, so no wait is longer."""


async def sleep_until(time: Callable[[], float], moment: float) -> None:
    """Return at ``moment`` of the clock ``time``, soon after it if the machine slept through it."""
    left = moment - time()
    while left > 0:
        await asyncio.sleep(min(left, LONGEST_NAP))
        left = moment - time()
