"""Rounds are slots of DHT time: nobody announces a start, and who wakes up knows what time it is."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from spheroid_node.run import RoundSpec


@dataclass(frozen=True)
class Slots:
    """Round r lasts from genesis + r·period; its deadline τ is ``settle`` before its end. All in seconds."""

    genesis: float
    period: float
    settle: float

    @classmethod
    def of(cls, spec: RoundSpec) -> Slots:
        return cls(spec.genesis, spec.period, spec.settle)

    def round_at(self, now: float) -> int:
        """The round whose slot ``now`` lies in; −1 before the first.

        Exact for the slot limits: ``round_at(start(r)) == r`` whatever the rounding of the division.
        """
        round = floor((now - self.genesis) / self.period)
        if self.start(round + 1) <= now:
            round += 1
        elif self.start(round) > now:
            round -= 1
        return max(round, -1)

    def start(self, round: int) -> float:
        return self.genesis + round * self.period

    def deadline(self, round: int) -> float:
        """τ: what reaches the aggregator at this time or after it is late."""
        return self.end(round) - self.settle

    def end(self, round: int) -> float:
        return self.start(round + 1)
