"""Ctrl-C and SIGTERM: once to leave cleanly, twice to leave now."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import TracebackType
from typing import Self

import structlog

log = structlog.get_logger()

SAY_SECONDS = 0.3
"""For the last words of a process that ends itself; whoever reads them may be stuck too."""


class Stopping(asyncio.Event):
    """Set by the first SIGINT or SIGTERM; the second ends the process at once. ``async with`` this.

    Until :meth:`started` is called the first one also ends what is inside, since a start may wait long for a
    network that is not there. Trainer and libp2p daemon end with the process that started them, whichever
    way it ends.

    With ``leave_within`` the process ends itself so many seconds after the first signal, as if it had left
    cleanly: no part of it that hangs, and no thread that it would wait for, holds it up for longer. A file
    that is being written then is as it was before.
    """

    _starting: asyncio.Task[object] | None = None

    def __init__(self, leave_within: float | None = None) -> None:
        super().__init__()
        self._leave_within = leave_within

    async def __aenter__(self) -> Self:
        self._starting = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        interrupted = kind is asyncio.CancelledError and self.is_set() and self._starting is not None
        if interrupted and self._starting is not None:
            self._starting.uncancel()
        return interrupted

    def started(self) -> None:
        """From now on whoever waits for the event ends things in order."""
        self._starting = None

    def _on_signal(self, number: signal.Signals) -> None:
        if self.is_set():
            os._exit(128 + number)
        log.info("node.leaving", signal=number.name)
        self.set()
        if self._leave_within is not None:
            timer = threading.Timer(self._leave_within, _leave_unfinished, [self._leave_within])
            timer.daemon = True  # it outlives the event loop, and nobody waits for it
            timer.start()
        if self._starting is not None:
            self._starting.cancel()


def _leave_unfinished(seconds: float) -> None:
    last_words = threading.Thread(target=_say_so, args=[seconds], daemon=True)
    last_words.start()
    last_words.join(SAY_SECONDS)
    os._exit(0)


def _say_so(seconds: float) -> None:
    log.warning("node.left_unfinished", seconds=seconds)
    sys.stdout.flush()
    sys.stderr.flush()
