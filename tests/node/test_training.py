"""A trainer kept at work, with one that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from spheroid_node.errors import TrainerFailed
from spheroid_node.node.training import SLICE_SECONDS, Training
from spheroid_node.rounds.pacing import Pace
from spheroid_node.rounds.slots import Slots
from spheroid_node.training.trainer_protocol import Train
from spheroid_node.wire.messages import Message

SLOTS = Slots(genesis=0.0, period=10.0, settle=2.0)
MOST = 100


class Counting:
    """Makes ten steps a slice, or as many as it may, each a tenth of a second of a clock that it moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[Train] = []
        self.error: TrainerFailed | None = None

    def time(self) -> float:
        return self.now

    async def request(self, request: Message, timeout: float) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        assert isinstance(request, Train)
        self.asked.append(request)
        steps = min(10, request.max_steps)
        self.now += steps / 10
        return {
            "steps": steps, "tokens": 8 * steps, "seconds": steps / 10, "upstream_seconds": steps / 20,
            "loss": float(len(self.asked)), "step_seconds": 0.1,
        }  # fmt: skip


@asynccontextmanager
async def running(trainer: Counting, most: int = MOST) -> AsyncIterator[Training]:
    training = Training(cast(Any, trainer), Pace(), SLOTS, most, trainer.time)
    task = asyncio.create_task(training.run())
    try:
        yield training
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_is_trained_before_versions_are_loaded() -> None:
    trainer = Counting()
    async with running(trainer) as training:
        await turns()
        async with training.paused():
            await turns()
        await turns()
        assert trainer.asked == []
        async with training.loading():
            pass
        await turns()
        assert trainer.asked


async def test_it_trains_until_the_moment_and_tells_what_it_did() -> None:
    trainer = Counting()
    async with running(trainer) as training:
        async with training.loading():
            pass
        await training.until(3.0)
        async with training.paused():
            asked = len(trainer.asked)
            await turns()
            assert len(trainer.asked) == asked, "nothing is trained while it is paused"
            done = training.take()
        assert (done.steps, done.tokens, done.seconds) == (10 * asked, 80 * asked, pytest.approx(asked))
        assert done.loss == pytest.approx(sum(range(1, asked + 1)) / asked)
        assert (done.tokens_per_second, done.upstream_seconds) == pytest.approx((80.0, asked / 2))
        assert asked >= 3
        # No slice is to last beyond the moment.
        assert [request.seconds for request in trainer.asked[:3]] == [SLICE_SECONDS] * 3


async def test_no_slice_lasts_beyond_the_moment() -> None:
    trainer = Counting()
    async with running(trainer) as training:
        waiting = asyncio.create_task(training.until(0.2))
        await turns(1)
        async with training.loading():
            pass
        await waiting
        assert trainer.asked[0].seconds == pytest.approx(0.2)
        assert all(request.seconds == SLICE_SECONDS for request in trainer.asked[1:])


async def test_a_full_update_waits_and_what_comes_ahead_of_the_version_is_limited() -> None:
    trainer = Counting()
    async with running(trainer) as training:
        async with training.loading():
            pass
        await training.until(1000.0)
        assert training.is_full
        await turns()
        assert sum(min(10, request.max_steps) for request in trainer.asked) == MOST
        async with training.paused():
            assert training.take().steps == MOST
        # Of the next 100 steps, (10 − 2 − 2·0.5) / 0.1 = 70 will fit behind the new version.
        await turns(200)
        async with training.paused():
            assert training.take().steps == 30
        async with training.loading():
            pass
        await training.until(1000.0)
        assert training.take().steps == MOST


async def test_a_clock_that_is_set_back_ends_the_wait() -> None:
    trainer = Counting()
    trainer.now = 600.0
    async with running(trainer, most=10**6) as training:
        async with training.loading():
            pass
        waiting = asyncio.create_task(training.until(1e6))
        await turns()
        assert not waiting.done()
        trainer.now -= 600.0
        await asyncio.wait_for(waiting, 10)


async def test_one_step_is_made_also_when_the_moment_is_past() -> None:
    trainer = Counting()
    trainer.now = 50.0
    async with running(trainer) as training:
        waiting = asyncio.create_task(training.until(3.0))
        await turns()
        assert not waiting.done()
        async with training.loading():
            pass
        await waiting
        assert training.take().steps > 0


async def test_a_trainer_that_fails_ends_it_and_it_begins_anew_with_nothing() -> None:
    trainer = Counting()
    training = Training(cast(Any, trainer), Pace(), SLOTS, MOST, trainer.time)
    async with training.loading():
        pass
    task = asyncio.create_task(training.run())
    await training.until(0.5)
    trainer.error = TrainerFailed("it is dead")
    with pytest.raises(TrainerFailed):
        await task
    training.reset()
    assert training.take().steps == 0
