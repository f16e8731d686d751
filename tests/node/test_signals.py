from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from spheroid_node.node.signals import Stopping

async def main(phase):
    async with Stopping() as stopping:
        try:
            if phase == "starting":
                print("ready", flush=True)
                await asyncio.sleep(60)
            stopping.started()
            print("ready", flush=True)
            await stopping.wait()
            print("leaving", flush=True)
            await asyncio.sleep(60 if phase == "stuck" else 0)
        finally:
            print("in order", flush=True)

asyncio.run(main({phase!r}))
"""


def told(phase: str, signals: int, number: signal.Signals = signal.SIGINT) -> tuple[int, list[str]]:
    """Exit code and words of a program that gets ``signals`` signals, each after a line of its output."""
    program = PROGRAM.replace("{phase!r}", repr(phase))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for _ in range(signals):
        while (line := process.stdout.readline().strip()) not in ("ready", "leaving"):
            pass
        lines.append(line)
        process.send_signal(number)
    rest = process.communicate(timeout=30)[0].split("\n")
    return process.returncode, [*lines, *(line for line in rest if line in ("leaving", "in order"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_start_at_once_and_in_order(number: signal.Signals) -> None:
    assert told("starting", 1, number) == (0, ["ready", "in order"])


def test_once_started_the_first_signal_only_asks(number: signal.Signals = signal.SIGINT) -> None:
    assert told("running", 1, number) == (0, ["ready", "leaving", "in order"])


def test_the_second_signal_ends_the_process_now() -> None:
    code, lines = told("stuck", 2)
    assert code == 128 + signal.SIGINT
    assert lines == ["ready", "leaving"]
