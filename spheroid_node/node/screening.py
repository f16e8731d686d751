"""Updates tried out before they are accepted: does the model get worse on held-out text?"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from spheroid_node.errors import TrainerFailed
from spheroid_node.node.trainer import TrainerProcess
from spheroid_node.training.trainer_protocol import Screen
from spheroid_node.wire.messages import UpdateHeader

log = structlog.get_logger()

SCREEN_SECONDS = 60.0
LOADING_SECONDS = 8.0
"""An update may come before this node's trainer has its base; its author waits 20 s for an answer."""
POLL_SECONDS = 0.5


class Screening(Protocol):
    """What a collector asks about an update."""

    async def worse_by(self, header: UpdateHeader, payload: bytes, scale: float) -> float | None:
        """What it adds to the from-noise cross-entropy, nats a byte; None if that cannot be told."""


class TrainerScreening:
    """Asks this node's trainer, which has the versions, the held-out text and the device."""

    def __init__(self, trainer: TrainerProcess, windows: int) -> None:
        self._trainer, self._windows = trainer, windows

    async def worse_by(self, header: UpdateHeader, payload: bytes, scale: float) -> float | None:
        """See :class:`Screening`. A trainer that is down, or has not got the base in time, cannot tell."""
        request = Screen(
            group=header.group,
            version=header.base,
            payload=payload,
            dtype=header.dtype,
            scale=scale,
            windows=self._windows,
        )
        give_up_at = time.monotonic() + LOADING_SECONDS
        try:
            # No time-out around it: a trainer whose answer nobody reads has to be killed.
            while not (reply := await self._trainer.request(request, SCREEN_SECONDS))["loaded"]:
                if time.monotonic() >= give_up_at:
                    raise TrainerFailed(f"it has not loaded version {header.base}")
                await asyncio.sleep(POLL_SECONDS)
        except TrainerFailed as error:
            log.warning("round.not_screened", round=header.round, group=header.group, cause=error.problem)
            return None
        worse_by: float | None = reply["worse_by"]
        return worse_by
