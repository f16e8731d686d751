"""The demo, as ``make demo`` runs it, only shorter: its files stay behind, and its processes do not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import spheroid_node.model

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 200
LEAVE_SECONDS = 10.0
"""What the demo promises for the first Ctrl-C."""


class Demo:
    """A demo that runs in the background."""

    def __init__(self, folder: Path, minutes: str) -> None:
        (folder / "text.txt").write_text(TEXT)
        self.output = folder / "output"
        environment = os.environ | {"SPHEROID_RUNTIME_DIR": str(folder / "runtime"), "OMP_NUM_THREADS": "1"}
        arguments = ["--data", str(folder / "text.txt"), "--minutes", minutes, "--output", str(self.output)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spheroid_node", "demo", *arguments, "--prompt", "The ", "--bytes", "20"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_training(self) -> list[psutil.Process]:
        """Wait for the first round, and return all processes that belong to the demo."""
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "demo.round" in line:
                break
        else:
            pytest.fail("".join(said))
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Demo]]:
    demos = []

    def run(minutes: str) -> Demo:
        demos.append(Demo(tmp_path, minutes))
        return demos[-1]

    yield run
    for demo in demos:
        demo.process.kill()
        demo.process.communicate()


def left_over(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Which of ``processes`` still run after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.1)
    return alive


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_whole_demo(start: Callable[[str], Demo]) -> None:
    demo = start("0.05")
    processes = demo.wait_until_training()
    assert (
        len(processes) == 12
    )  # a bootstrap, three nodes with a trainer each, and a libp2p daemon for all five
    out, err = demo.process.communicate(timeout=240)
    assert demo.process.returncode == 0, err
    assert "\x1b" not in out + err
    lines = out.splitlines()
    assert lines[0].startswith("The ")
    assert lines[-3:] == [
        f"Model:  {demo.output / 'model'}",
        f"Logs:   {demo.output / 'logs'}",
        f"Figure: {demo.output / 'ce.png'}",
    ]
    config = json.loads((demo.output / "model" / "config.json").read_text())
    # After a round or two the first blocks of a staggered chain may still be at version 0.
    assert config["versions"]["block-2"] > 0
    assert config["versions"]["interface"] > 0
    assert config["evaluation"]["ce_readout"] < 5.545
    assert spheroid_node.model.load(demo.output / "model").run.name == "demo"
    assert (demo.output / "ce.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((demo.output / "logs").iterdir())) == 4
    assert left_over(processes, 5) == []


def test_one_ctrl_c_stops_everything(start: Callable[[str], Demo]) -> None:
    demo = start("5")
    processes = demo.wait_until_training()
    demo.process.send_signal(signal.SIGINT)
    _, err = demo.process.communicate(timeout=LEAVE_SECONDS + 20)
    assert demo.process.returncode == 130
    assert "Stopped." in err and "Traceback" not in err
    assert left_over(processes, 0) == []
    logs = [log.read_text() for log in sorted((demo.output / "logs").iterdir())]
    assert all("node.stopped" in log or "bootstrap.stopped" in log for log in logs)


def test_a_second_ctrl_c_kills(start: Callable[[str], Demo]) -> None:
    demo = start("5")
    processes = demo.wait_until_training()
    for process in processes:
        if process.name() != "p2pd":  # nodes that cannot leave by themselves
            process.suspend()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.stderr is not None
    assert any("Ctrl-C again" in line for line in demo.process.stderr)
    demo.process.send_signal(signal.SIGINT)
    demo.process.communicate(timeout=20)
    assert demo.process.returncode == 130
    assert left_over(processes, 5) == []


def test_nothing_outlives_a_killed_demo(start: Callable[[str], Demo]) -> None:
    demo = start("5")
    processes = demo.wait_until_training()
    demo.process.kill()
    demo.process.communicate()
    assert left_over(processes, 10) == []
