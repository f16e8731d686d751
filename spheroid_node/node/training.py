"""A trainer kept at work: slice after slice, so that in between it can be asked something else.

Training goes on while updates travel and versions are fetched (design.md, section 6, point 9). Only what
needs the trainer itself stops it: loading versions, measuring them, trying an update out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from spheroid_node.node.clock import LONGEST_NAP, SET_BACK
from spheroid_node.node.trainer import TrainerProcess
from spheroid_node.rounds.pacing import Pace
from spheroid_node.rounds.slots import Slots
from spheroid_node.training.trainer_protocol import Train

SLICE_SECONDS = 0.5
"""What asks the trainer for something else waits for the end of a slice."""
GRACE_SECONDS = 120.0
"""Beyond its slice, what a trainer may take for the step it has begun before it counts as hung."""


@dataclass
class Trained:
    """What a trainer did since its last update was taken."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    upstream_seconds: float = 0.0
    losses: float = 0.0
    """Sum over the steps."""

    @property
    def loss(self) -> float | None:
        """Mean over the steps, nats a byte; None without any."""
        return self.losses / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class Training:
    """Gives a trainer its slices: at most ``most_steps`` for an update, and before its version is there no
    more than :meth:`Pace.ahead`.

    Run :meth:`run` beside whoever uses it: it ends with the :class:`TrainerFailed` of a slice.
    """

    def __init__(
        self, trainer: TrainerProcess, pace: Pace, slots: Slots, most_steps: int, time: Callable[[], float]
    ) -> None:
        self._trainer, self._pace, self._slots, self._time = trainer, pace, slots, time
        self._most_steps = self._limit = most_steps
        self._turn = asyncio.Lock()
        self._ready = asyncio.Event()
        """Versions are loaded, and the update may have more steps."""
        self._stepped = asyncio.Event()
        self._ends_at = -math.inf
        self._done = Trained()

    @property
    def is_full(self) -> bool:
        """Whether the update has all the steps that it may have for now."""
        return self._done.steps >= self._limit

    async def run(self) -> None:
        """Slice after slice, for ever. Raises :class:`TrainerFailed`."""
        while True:
            await self._ready.wait()
            async with self._turn:
                if self._ready.is_set():
                    await self._train()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No slice runs meanwhile."""
        async with self._turn:
            yield

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """:meth:`paused`; what is trained afterwards is trained on the newest versions."""
        async with self.paused():
            yield
            self._limit = self._most_steps
            self._refresh()

    def reset(self) -> None:
        """What was trained is lost: wait for versions to be loaded again."""
        self._ready.clear()
        self._done = Trained()

    async def until(self, moment: float) -> None:
        """Return at ``moment``, or when the update is full; in any case not before its first step.

        And when the clock is set back, as :func:`sleep_until` does.
        """
        self._ends_at = moment
        before = left = moment - self._time()
        while not self._done.steps or (0 < left < before + SET_BACK and not self.is_full):
            before = min(before, left)
            self._stepped.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LONGEST_NAP) if left > 0 else LONGEST_NAP):
                    await self._stepped.wait()
            left = moment - self._time()

    def take(self) -> Trained:
        """What was done since this was last called; the caller has paused it, and takes the update."""
        done, self._done = self._done, Trained()
        self._limit = self._pace.ahead(self._slots, self._most_steps)
        self._refresh()
        return done

    async def _train(self) -> None:
        left = self._ends_at - self._time()
        seconds = min(SLICE_SECONDS, left) if left > 0 else SLICE_SECONDS
        reply = await self._trainer.request(
            Train(max_steps=self._limit - self._done.steps, seconds=seconds), seconds + GRACE_SECONDS
        )
        if reply["steps"]:
            self._pace.stepped(reply["step_seconds"])
            self._done.losses += reply["steps"] * reply["loss"]
        self._done.steps += reply["steps"]
        self._done.tokens += reply["tokens"]
        self._done.seconds += reply["seconds"]
        self._done.upstream_seconds += reply["upstream_seconds"]
        self._stepped.set()
        self._refresh()

    def _refresh(self) -> None:
        if self.is_full:
            self._ready.clear()
        else:
            self._ready.set()
