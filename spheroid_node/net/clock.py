"""DHT time: this machine's clock, put right by its peers where it is wrong.

Everything that a swarm agrees on in time, rounds and the lives of records, is DHT time. hivemind takes the
clock of the machine for it and turns away whoever is off by three seconds. Here a machine whose clock is
wrong follows the clocks of the others, and its owner is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import structlog

log = structlog.get_logger()

AGREEMENT = 2.0
"""Seconds by which clocks may differ and still say the same."""
NOTABLE = 1.0
"""Seconds up to which a clock, or its correction, counts as right: a round trip leaves them uncertain."""
MAX_OFFSET = 24 * 3600.0
"""Seconds by which peers may correct a clock. What is further off is for its owner to set."""
REMEDY = "set the clock of this machine, for example with NTP; until then the node follows its peers' clocks"


def steady() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Clock:
    """A machine's clock and its correction."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady) -> None:
        self.wall = wall
        self.offset = 0.0
        """Seconds that the peers are ahead of this machine's clock."""
        self._steady = steady
        self._reference = wall() - steady()
        self._trusted = False
        """Whether this machine's clock counts as much as a peer's."""

    def time(self) -> float:
        """DHT time: seconds since 1970."""
        return self.wall() + self.offset

    @property
    def note(self) -> str:
        """For the owner; empty while the clock is right."""
        if not self.offset:
            return ""
        return f"clock {abs(self.offset):.0f} s {'slow' if self.offset > 0 else 'fast'}"

    def trust(self) -> None:
        """Of a peer that begins a swarm: there is nobody else to ask."""
        self._trusted = True

    def has_jumped(self) -> bool:
        """Whether somebody has set this machine's clock since this was asked last."""
        reference = self.wall() - self._steady()
        jumped = abs(reference - self._reference) > NOTABLE
        self._reference = reference
        if jumped:
            log.info("clock.jumped")
            self._trusted = False
        return jumped

    def hear(self, ahead: Sequence[float]) -> bool:
        """Follow what most say; False if that is too far off to be followed.

        ahead: seconds by which each peer's DHT time is ahead of :attr:`wall`. Where no majority agrees, all
        stays as it is. A clock that was not set since it was last confirmed has a vote of its own.
        """
        if not ahead:
            self._trusted = True  # nobody to ask, so nobody that may decide it alone later
            return True
        agreed = majority([*ahead, 0.0] if self._trusted else ahead)
        if agreed is None:
            log.debug("clock.no_majority", peers=len(ahead))
            return True
        if abs(agreed) > MAX_OFFSET:
            return False
        self._trusted = True
        self._follow(agreed if abs(agreed) > NOTABLE else 0.0, len(ahead))
        return True

    def _follow(self, offset: float, peers: int) -> None:
        if abs(offset - self.offset) <= NOTABLE and bool(offset) == bool(self.offset):
            return
        self.offset = offset
        if offset:
            log.warning("clock.off", seconds=round(-offset, 1), peers=peers, remedy=REMEDY)
        else:
            log.info("clock.right", peers=peers)


def majority(offsets: Sequence[float]) -> float | None:
    """The median of those that more than half of all agree with, if there are such."""
    ordered = sorted(offsets)
    middle = ordered[len(ordered) // 2]  # in a majority that stands together, whatever the others say
    agreeing = [offset for offset in ordered if abs(offset - middle) <= AGREEMENT]
    return median(agreeing) if 2 * len(agreeing) > len(ordered) else None


dht_clock = Clock()
"""Of this process: a machine has one clock."""
