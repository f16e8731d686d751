"""When a worker stops training so that its update arrives before τ."""

from __future__ import annotations

from dataclasses import dataclass

from spheroid_node.rounds.slots import Slots

UPLOAD_MARGIN = 2.0
"""An upload may take this multiple of what it usually takes."""

SMOOTHING = 0.25
"""Weight of a new measurement that is below the estimate; one above it counts in full."""


def stop_training_at(slots: Slots, round: int, upload_seconds: float, step_seconds: float) -> float:
    """DHT time after which no further step begins; never before the slot starts.

    ``upload_seconds`` is the smoothed time from the end of training to the receipt, ``step_seconds`` the
    time of one step: a step that has begun is finished.
    """
    latest = slots.deadline(round) - UPLOAD_MARGIN * upload_seconds - step_seconds
    return max(slots.start(round), latest)


@dataclass
class Pace:
    """A worker's measurements of itself, in seconds. Rises at once and falls slowly: late costs a round."""

    upload_seconds: float = 0.5
    step_seconds: float = 0.0

    def uploaded(self, seconds: float) -> None:
        """Time that all updates of one round took from the end of training to the last receipt."""
        self.upload_seconds = _smooth(self.upload_seconds, seconds)

    def not_delivered(self, seconds: float, slots: Slots) -> None:
        """Time after which nobody had taken an update: an upload takes that at least.

        No more than a round, since what is longer says only that nobody could be reached.
        """
        self.upload_seconds = max(self.upload_seconds, min(seconds, slots.period))

    def stepped(self, seconds: float) -> None:
        """Measured time of one step."""
        self.step_seconds = _smooth(self.step_seconds, seconds) if self.step_seconds else seconds

    def skipped(self) -> None:
        """No step fitted into a round, so nothing was measured: hope a little, or it would stay so for ever.

        One long upload would otherwise keep a machine out of all later rounds.
        """
        self.upload_seconds *= 1 - SMOOTHING
        self.step_seconds *= 1 - SMOOTHING

    def stop_at(self, slots: Slots, round: int) -> float:
        return stop_training_at(slots, round, self.upload_seconds, self.step_seconds)

    def ahead(self, slots: Slots, most: int) -> int:
        """Steps to train while an update is on its way, of the ``most`` that the next one may have.

        As many as will not fit behind the new version: what is learnt from the old one is worth less.
        """
        if not self.step_seconds:
            return most
        later = slots.period - slots.settle - UPLOAD_MARGIN * self.upload_seconds
        return max(0, most - max(0, int(later / self.step_seconds)))

    def needed(self) -> float:
        """Seconds that a slot must leave before τ for this machine to contribute one step."""
        return UPLOAD_MARGIN * self.upload_seconds + self.step_seconds

    def can_keep_up(self, slots: Slots) -> bool:
        """False for a worker that would never make the deadline; its owner should be told :meth:`needed`."""
        return self.needed() < slots.period - slots.settle


def _smooth(estimate: float, measured: float) -> float:
    return measured if measured > estimate else estimate + SMOOTHING * (measured - estimate)
