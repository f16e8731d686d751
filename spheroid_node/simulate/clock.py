"""Virtual time: a queue of what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Runs actions in the order of their times; those of one time in the order in which they were added."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._number = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have ``action`` called at ``time``, or now if that has passed."""
        heapq.heappush(self._events, (max(time, self.now), next(self._number), action))

    def run_until(self, end: float) -> None:
        """Let everything before ``end`` happen, also what is added meanwhile; then it is ``end``."""
        while self._events and self._events[0][0] < end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end
