"""Waiting for a moment of DHT time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST_NAP = 1.0
"""An event loop's clock stands still while a machine sleeps and DHT time goes on, so no wait is longer."""


SET_BACK = 5.0
"""Seconds by which a moment moves away while it is waited for, if somebody has put the clock right."""


async def sleep_until(time: Callable[[], float], moment: float) -> None:
    """Return at ``moment`` of the clock ``time``, soon after it if the machine slept through it.

    And when the clock is set back: who waits must look anew at what time it is.
    """
    before = left = moment - time()
    while 0 < left < before + SET_BACK:
        before = min(before, left)
        await asyncio.sleep(min(left, LONGEST_NAP))
        left = moment - time()
