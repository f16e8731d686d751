"""Runs a command's coroutine in the event loop that hivemind is used in here: our own, on uvloop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


def run_async(main: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run ``main`` to its end and return what it returns.

    Several errors at once (a TaskGroup's) become the first of them, so that a user sees one cause.
    """
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(main)
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _loop_factory() -> Any:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
