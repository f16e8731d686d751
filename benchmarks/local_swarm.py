"""A swarm of real processes on this machine, for benchmarks: started, watched through its logs, stopped."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil

from spheroid_node.cli.demo.processes import Child, Children
from spheroid_node.cli.demo.shape import to_toml
from spheroid_node.config import LOOPBACK, NodeConfig, left_addresses, runtime_dir
from spheroid_node.run import RunSpec

T = TypeVar("T")

START_SECONDS = 240.0


class LocalSwarm:
    """A bootstrap or more, and workers by name."""

    bootstrap: Child

    def __init__(self, folder: Path, run: RunSpec, children: Children) -> None:
        self.folder, self.run, self.workers = folder, run, dict[str, Child]()
        self._children = children
        self._run_file = folder / "run.toml"
        self._run_file.write_text(to_toml(run))
        self.address = ""
        self.address = self.start_bootstrap("bootstrap")

    def start_bootstrap(self, name: str, *more: str) -> str:
        """Start a bootstrap, the newest in :attr:`bootstrap`; returns its address once it has one."""
        self.bootstrap = self.launch_bootstrap(name, *more)

        def address() -> str | None:
            found = left_addresses(runtime_dir()).get(self.run.run_id)
            return found if found != self.address else None

        return wait_for("the bootstrap", address, START_SECONDS)

    def launch_bootstrap(self, name: str, *more: str) -> Child:
        """Start a bootstrap without waiting for it."""
        arguments = ["--run", str(self._run_file), "--state-dir", str(self.folder / name), *self._shared()]
        return self._children.start(name, ["bootstrap", *arguments, *more])

    def join(self, block: int, name: str, text: Sequence[str] = ()) -> Child:
        """Start a worker of one thread. ``text`` are its --data and --held-out options, and any others."""
        arguments = ["--block", str(block), "--peer", self.address, "--run", self.run.run_id]
        arguments += ["--state-dir", str(self.folder / name), "--threads", "1", *text, *self._shared()]
        self.workers[name] = self._children.start(name, ["join", *arguments])
        return self.workers[name]

    def config(self) -> NodeConfig:
        """For a client of this swarm."""
        return NodeConfig(state_dir=self.folder, peers=(self.address,), run=self.run.run_id, host=LOOPBACK)

    def _shared(self) -> list[str]:
        return [f"--host={LOOPBACK}", "--log-format=json"]


@contextmanager
def local_swarm(folder: Path, run: RunSpec) -> Iterator[LocalSwarm]:
    """A swarm that has left when this ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with Children(folder) as children:
        try:
            yield LocalSwarm(folder, run, children)
        finally:
            asyncio.run(children.stop())


def wait_for(what: str, probe: Callable[[], T | None], seconds: float) -> T:
    """The first result of ``probe`` that is true. Raises :class:`TimeoutError`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := probe():
            return result
        time.sleep(0.2)
    raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")


def events(child: Child, name: str) -> list[dict[str, object]]:
    """The events of that name in a worker's log."""
    return [event for event in child.events() if event["event"] == name]


def stamp(event: dict[str, Any]) -> float:
    """When it was logged, seconds since 1970."""
    return datetime.fromisoformat(str(event["timestamp"]).replace("Z", "+00:00")).timestamp()


class Journal:
    """The log of one name, read on as it grows: also over restarts, which append to it."""

    def __init__(self, log: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._log, self._offset = log, 0

    def read_on(self) -> list[dict[str, Any]]:
        """The events that have come since the last call; other output is skipped."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        new = []
        for line in whole.splitlines():
            # A process that was killed may have left half a line, with which the next one's begins.
            with suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, dict) and "event" in fields:
                    new.append(fields | {"at": stamp(fields)})
        self.events += new
        return new

    def since(self, moment: float, name: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of that name and with these fields that were logged after ``moment``, newest first."""
        found = []
        for event in reversed(self.events):
            if event["at"] <= moment:
                break
            if event["event"] == name and all(event.get(key) == value for key, value in fields.items()):
                found.append(event)
        return found


def pss_mb(pid: int) -> float:
    """Proportional set size of a process and all that it started, in MB (10⁶ bytes)."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True))) / 1e6
