"""Where a step is computed: alone and brief, in the event loop; else in the thread, with what else waits."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spheroid_node.serving import engine as engines
from spheroid_node.serving.engine import Engine, Work, for_serving
from spheroid_node.serving.steps import Piece
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import HopAddress
from tests.serving.memory import opening, small_model


@pytest.fixture
def engine(executor: ThreadPoolExecutor) -> tuple[Engine, list[bool]]:
    """The engine of block 0, and for each of its batches whether the event loop computed it."""
    made = Engine(small_model().run, 0, executor)
    compute, here = made._compute, list[bool]()

    def noted(batch: Any) -> Any:
        here.append(threading.current_thread() is threading.main_thread())
        return compute(batch)

    made._compute = noted  # type: ignore[method-assign]
    return made, here


def text() -> Any:
    """Makes the next work of one text."""
    hop = for_serving(small_model().hop(0))
    cache, position = hop.block.new_cache(), 0
    opened = opening(bytes(16), next=HopAddress(peer="next", host="memory", port=1))

    def work(count: int = 1) -> Work:
        nonlocal position
        piece, position = Piece(position, bytes(count)), position + count
        return Work(opened, hop, cache, piece, None)

    return work


async def test_a_lone_text_stays_in_the_event_loop(
    engine: tuple[Engine, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BRIEF_SECONDS", 10.0)
    made, here = engine
    lone, other = text(), text()
    for _ in range(4):
        await made.run(lone())
    assert here == [False, False, True, True], "as soon as it is known how long a step takes"
    await made.run(other())
    await made.run(lone())
    assert here[4:] == [False, False], "somebody else is there"
    await asyncio.gather(made.run(lone()), made.run(other()))
    assert not any(here[6:])


async def test_what_takes_long_never_does(
    engine: tuple[Engine, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, here = engine
    work = text()
    monkeypatch.setattr(engines, "BRIEF_SECONDS", 1e-9)
    for _ in range(4):
        await made.run(work())
    assert not any(here)


async def test_a_few_positions_after_many_are_not_taken_for_brief(
    engine: tuple[Engine, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of few positions takes nearly as long as one of many, not a share of it."""
    made, here = engine
    work, seconds = text(), [0.001, 0.060, 0.060]
    monkeypatch.setattr(engines.time, "perf_counter", _clock(seconds))
    for count in (8, 20, 20, 1):
        await made.run(work(count))
    assert not any(here)


def _clock(steps: list[float]) -> Any:
    """Read twice a step, which takes what comes next; the last one again and again."""
    now, reads = 0.0, 0

    def read() -> float:
        nonlocal now, reads
        reads += 1
        if reads % 2 == 0:
            now += steps[min(reads // 2 - 1, len(steps) - 1)]
        return now

    return read


async def test_a_step_that_cannot_be_computed_fails_in_the_loop_too(
    engine: tuple[Engine, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BRIEF_SECONDS", 10.0)
    made, here = engine
    work = text()
    for _ in range(3):
        await made.run(work())
    bad = work()
    bad.cache.layers[0].first = 1000  # as if its beginning were gone
    with pytest.raises(WireError):
        await made.run(bad)
    assert here[-1]
