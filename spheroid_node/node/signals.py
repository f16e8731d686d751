"""Ctrl-C and SIGTERM: once to leave cleanly, twice to leave now."""

from __future__ import annotations

import asyncio
import os
import signal
from types import TracebackType
from typing import Self

import structlog

log = structlog.get_logger()


class Stopping(asyncio.Event):
    """Set by the first SIGINT or SIGTERM; the second ends the process at once. ``async with`` this.

    Until :meth:`started` is called the first one also ends what is inside, since a start may wait long for a
    network that is not there. Trainer and libp2p daemon end with the process that started them, whichever
    way it ends.
    """

    _starting: asyncio.Task[object] | None = None

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
        if self._starting is not None:
            self._starting.cancel()
