"""Work that is too long for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_its_end(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Do ``work`` in a thread. Who is cancelled meanwhile waits for it and is cancelled then.

    A thread cannot be stopped: after ``asyncio.to_thread`` was cancelled, it goes on changing what others
    believe to be theirs.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **options))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        if not thread.cancelled():
            thread.exception()  # seen, or asyncio would complain
        raise
