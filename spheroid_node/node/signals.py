"""Ctrl-C and SIGTERM: once to leave cleanly, twice to leave now."""

from __future__ import annotations

import asyncio
import os
import signal

import structlog

log = structlog.get_logger()


def stop_on_signals() -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; the second ends the process at once.

    Trainer and libp2p daemon end with the process that started them, whichever way it ends.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        log.info("node.leaving", signal=number.name)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stopping
