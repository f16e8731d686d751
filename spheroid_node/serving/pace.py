"""How far block 0 drafts ahead of what is judged, in what pieces, and how many branches it adds.

Learns from what it sees; no clock of its own.
"""

from __future__ import annotations

import math

from spheroid_node.wire.messages import MAX_DRAFTS

PRIOR = 0.8, 20.0
"""Share of drafts that hold, and how many judged drafts that belief is worth."""
FADE = 0.98
"""What a judged draft still counts for after the next one."""
HOPELESS = 0.03
"""A draft that would be reached less often than this is not worth its computation."""
SMOOTHING = 0.1
BRANCH_DRAFTS = 8
"""Drafts of a branch."""
BRANCHES = 8
"""A line has at most."""


class Pace:
    """Shared by all sessions of a hop: how good drafts are is a matter of the model."""

    def __init__(self) -> None:
        self._held, self._judged = PRIOR[0] * PRIOR[1], PRIOR[1]
        self._draft_seconds = self._hop_seconds = self._spare_seconds = 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafts that hold, where all before them do."""
        return self._held / self._judged

    @property
    def depth(self) -> int:
        """Drafts ahead of the last judged byte, beyond which the next would hardly ever be reached."""
        return max(1, min(MAX_DRAFTS, math.ceil(math.log(HOPELESS) / math.log(min(self.acceptance, 0.99)))))

    @property
    def piece(self) -> int:
        """Drafts that travel together: as few as the slowest of the other hops can keep up with."""
        if not self._draft_seconds:
            return 1
        return max(1, min(self.depth, math.ceil(self._hop_seconds / self._draft_seconds)))

    @property
    def branches(self) -> int:
        """Branches of a line that block 0 has time for until it hears of the line."""
        if not self._draft_seconds:
            return 0
        return min(BRANCHES, int(self._spare_seconds / (BRANCH_DRAFTS * self._draft_seconds)))

    def judged(self, held: int, failed: bool) -> None:
        """``held`` drafts in a row held; ``failed``: the one after them did not."""
        for outcome in [1.0] * held + [0.0] * failed:
            self._held, self._judged = FADE * self._held + outcome, FADE * self._judged + 1

    def drafted(self, seconds: float) -> None:
        """One more draft took so long."""
        self._draft_seconds = _smoothed(self._draft_seconds, seconds)

    def waited(self, seconds: float) -> None:
        """From the end of a line to what was heard of it next, it took so long."""
        self._spare_seconds = _smoothed(self._spare_seconds, seconds)

    def swept(self, hop_seconds: list[float]) -> None:
        """A piece took so long at each of the hops after block 0."""
        if hop_seconds:
            self._hop_seconds = _smoothed(self._hop_seconds, max(hop_seconds))


def _smoothed(before: float, now: float) -> float:
    return before + SMOOTHING * (now - before) if before else now
