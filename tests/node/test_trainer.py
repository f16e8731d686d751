from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import pytest_asyncio
import uvloop
from structlog.testing import capture_logs

from spheroid_node.errors import DataTooShort, TrainerFailed
from spheroid_node.node.trainer import TrainerProcess
from spheroid_node.run import RunSpec
from spheroid_node.training.trainer_protocol import Configure, Evaluate, Train


@pytest.fixture(scope="module")
def event_loop_policy() -> Iterator[uvloop.EventLoopPolicy]:
    """Its pipes fail in ways of their own, so test what runs."""
    yield uvloop.EventLoopPolicy()


def configuration(run: RunSpec, tmp_path: Path, text: str) -> Configure:
    (tmp_path / "text.txt").write_text(text)
    return Configure(
        run=run.pack(), block=0, device="cpu", data=[str(tmp_path / "text.txt")], held_out=[],
        worker_seed=1, threads=1, state=str(tmp_path / "optimiser"),
    )  # fmt: skip


@pytest_asyncio.fixture
async def trainer(run: RunSpec, tmp_path: Path) -> AsyncIterator[TrainerProcess]:
    trainer = TrainerProcess(configuration(run, tmp_path, "abc " * 500))
    await trainer.start()
    yield trainer
    await trainer.stop()


async def test_a_trainer_trains_dies_and_is_started_again(trainer: TrainerProcess) -> None:
    train = Train(max_steps=2, seconds=30.0)
    assert (await trainer.request(train, 60))["steps"] == 2
    assert trainer.pid is not None
    for _ in range(2):  # asked while it dies, and again when it is long dead
        os.kill(trainer.pid, signal.SIGKILL) if psutil.pid_exists(trainer.pid) else None
        with pytest.raises(TrainerFailed, match="died while asked to train"):
            await trainer.request(train, 60)
    await trainer.start()
    assert (await trainer.request(train, 60))["steps"] == 2


async def test_stop_ends_it_and_a_stopped_one_says_so(trainer: TrainerProcess) -> None:
    pid = trainer.pid
    await trainer.stop()
    assert pid is not None and not psutil.pid_exists(pid)
    await trainer.stop()
    with pytest.raises(TrainerFailed):
        await trainer.request(Evaluate(windows=1), 5)


async def test_one_that_does_not_answer_is_killed(trainer: TrainerProcess) -> None:
    assert trainer.pid is not None
    process = psutil.Process(trainer.pid)
    os.kill(trainer.pid, signal.SIGSTOP)
    with pytest.raises(TrainerFailed, match="no answer to evaluate in 0 s"):
        await trainer.request(Evaluate(windows=1), 0.2)
    async with asyncio.timeout(10):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("answer", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x01\xc1"])
async def test_an_answer_that_is_none_ends_it(trainer: TrainerProcess, answer: bytes) -> None:
    """What comes after it cannot be told from it."""
    real, killed = cast(Any, trainer._process), []
    stdout = asyncio.StreamReader()
    stdout.feed_data(answer)
    trainer._process = cast(
        Any,
        SimpleNamespace(
            stdin=real.stdin, stdout=stdout, returncode=None, kill=lambda: killed.append(True), wait=real.wait
        ),
    )
    with pytest.raises(TrainerFailed, match="its answer to evaluate makes no sense"):
        await trainer.request(Evaluate(windows=1), 30)
    assert killed
    trainer._process = real


async def test_the_users_error_is_raised_as_it_is(run: RunSpec, tmp_path: Path) -> None:
    trainer = TrainerProcess(configuration(run, tmp_path, "abc"))
    with pytest.raises(DataTooShort, match="Give more text"):
        await trainer.start()
    await trainer.stop()


async def test_its_words_become_lines_of_the_log_however_long(run: RunSpec, tmp_path: Path) -> None:
    trainer = TrainerProcess(configuration(run, tmp_path, "abc"))
    stderr = asyncio.StreamReader(limit=100)
    trainer._process = cast(Any, SimpleNamespace(stderr=stderr))
    for line in (b"x" * 500, b"a warning of a library", b'{"event": "step", "level": "info", "loss": 1}'):
        stderr.feed_data(line + b"\n")
    stderr.feed_eof()
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            await trainer._relay_log()
    assert logs[-2:] == [
        {"event": "trainer.said", "line": "a warning of a library", "log_level": "warning"},
        {"event": "step", "loss": 1, "log_level": "info"},
    ]
