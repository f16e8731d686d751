"""A real swarm on loopback: real processes, real hivemind, a model small enough for two cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from spheroid_node.cli.demo.processes import Child, Children
from spheroid_node.cli.demo.shape import to_toml
from spheroid_node.config import LOOPBACK, NodeConfig, left_addresses
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec

T = TypeVar("T")

PATIENCE = 150.0
SHARED = ("test_rounds.py", "test_serving.py", "test_trouble.py", "test_wan.py")
"""Files whose tests take the swarm of the session."""


class BySwarm(LoadScopeScheduling):
    """Tests that share a swarm run in one process; other files may run beside them.

    The marker ``xdist_group`` would say the same, but pytest-xdist 3.8 does not see it under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "session" if Path(file).name in SHARED else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BySwarm:
    return BySwarm(config, log)


def wait_for(what: str, probe: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """The first result of ``probe`` that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := probe():
            return result
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")


class Node:
    """One ``join`` process and what its log says."""

    def __init__(self, child: Child, block: int, state: Path) -> None:
        self.child = child
        self.block = block
        self.state = state

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            event
            for event in self.child.events()
            if event["event"] == name and all(event.get(key) == value for key, value in fields.items())
        ]

    def wait_for(self, name: str, **fields: Any) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            assert self.child.process.poll() is None, f"{self.child.name} ended: {self.child.last_line}"
            return next(iter(self.events(name, **fields)), None)

        return wait_for(f"{name} {fields} in {self.child.log}", probe)

    @property
    def started(self) -> dict[str, Any]:
        return self.wait_for("node.started")

    @property
    def trainer_pid(self) -> int:
        return int(self.events("trainer.started")[-1]["pid"])

    def signal(self, number: signal.Signals) -> None:
        self.child.process.send_signal(number)


class Swarm:
    """A bootstrap and the nodes that a test starts."""

    def __init__(self, folder: Path, run: RunSpec, children: Children) -> None:
        self.folder = folder
        self.run = run
        self.children = children
        self.nodes: list[Node] = []
        self.run_file = folder / "run.toml"
        self.run_file.write_text(to_toml(run))
        arguments = ["--run", str(self.run_file), "--host", LOOPBACK, "--log-format", "json"]
        self.bootstrap = children.start(
            "bootstrap", ["bootstrap", *arguments, "--state-dir", str(folder / "bootstrap")]
        )
        self.address = wait_for("the bootstrap", lambda: left_addresses(folder / "runtime").get(run.run_id))

    def join(self, block: int | str, name: str, *more: str) -> Node:
        state = self.folder / name
        child = self.children.start(name, ["join", *self.join_arguments(block, state), *more])
        node = Node(child, int(block) if block != "auto" else -1, state)
        self.nodes.append(node)
        return node

    def join_arguments(self, block: int | str, state: Path) -> list[str]:
        return [
            "--block", str(block), "--peer", self.address, "--run", self.run.run_id, "--host", LOOPBACK,
            "--state-dir", str(state), "--threads", "1", "--log-format", "json",
        ]  # fmt: skip

    def of_group(self, group: str) -> list[Node]:
        return [node for node in self.nodes if group in ("interface", f"block-{node.block}")]

    def config(self) -> NodeConfig:
        return NodeConfig(state_dir=self.folder, peers=(self.address,), run=self.run.run_id, host=LOOPBACK)

    def command(self, *arguments: str, peers: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run a command of the swarm to its end."""
        entry = ["--peer", self.address, "--run", self.run.run_id] if peers else []
        return subprocess.run(
            [sys.executable, "-m", "spheroid_node", *arguments, *entry], capture_output=True, timeout=120
        )


def small_run(blocks: int = 3, **round: Any) -> RunSpec:
    return RunSpec(
        name="test",
        seed=7,
        model=ModelSpec(blocks=blocks, layers=1, width=32, heads=2, window=32),
        training=TrainingSpec(local_steps=40, batch=4),
        round=RoundSpec(**{"genesis": float(int(time.time())), "period": 6.0, "settle": 2.5} | round),
    )


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("swarm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        for name in [name for name in os.environ if name in ("SPHEROID_PEERS", "SPHEROID_STATE_DIR")]:
            patch.delenv(name)
        yield folder


@pytest.fixture(scope="session")
def swarm(environment: Path) -> Iterator[Swarm]:
    """Three blocks, two replicas each, training all the time."""
    with Children(environment) as children:
        swarm = Swarm(environment, small_run(), children)
        for number in range(6):
            swarm.join(number % 3, f"node-{number}")
        for node in swarm.nodes:
            assert node.started["block"] == node.block
        yield swarm
