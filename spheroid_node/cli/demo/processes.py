"""The demo's processes: each in a session of its own, none of which outlives the demo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spheroid_node.cli.parent import PARENT
from spheroid_node.config import RUNTIME_DIR

STOP_SECONDS = 8.0
"""How long a process may take to leave cleanly before it is killed."""

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Child:
    """One process, and where its output goes."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def last_line(self) -> str:
        """What it said last: where it ended by an error, that error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def events(self) -> list[dict[str, Any]]:
        """The lines of its log so far, for a process with ``--log-format json``; other output is skipped."""
        events = []
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, dict) and "event" in fields:
                    events.append(fields)
        return events


class Children:
    """All processes of one demo. Use as a context manager: what still runs at its end is killed."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        self._asked: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Run ``spheroid-node`` with ``arguments`` in the background."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "spheroid_node", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                # A session of its own: the terminal's Ctrl-C reaches the demo alone, which then stops
                # them in order, and a group that can be killed together with all that it started.
                start_new_session=True,
            )
        child = Child(name, log, process)
        self._children.append(child)
        return child

    def _environment(self) -> dict[str, str]:
        """This process's, without what the user has set for a node of their own: ports, peers, texts."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SPHEROID_") or name == RUNTIME_DIR
        }
        config_home = {"XDG_CONFIG_HOME": str(self._logs.parent)}  # where there is no config file
        return kept | config_home | {"OMP_NUM_THREADS": "1", PARENT: str(os.getpid())}

    def ended(self) -> list[Child]:
        """Those that run no more."""
        return [child for child in self._children if child.process.poll() is not None]

    @property
    def count(self) -> int:
        return len(self._children)

    def ask_to_leave(self) -> None:
        """Ask all to leave cleanly, but the first one only once the others have gone.

        That one is the bootstrap: the others say goodbye through it.
        """
        others = [child for child in self._children[1:] if child.process.poll() is None]
        for child in others or self._children[:1]:
            if child not in self._asked:
                child.process.send_signal(signal.SIGTERM)  # does nothing where it has ended
                self._asked.append(child)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask all to leave cleanly, and kill what has not after ``seconds``."""
        deadline = time.monotonic() + seconds
        while any(child.process.poll() is None for child in self._children):
            if time.monotonic() >= deadline:
                break
            self.ask_to_leave()
            await asyncio.sleep(_POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all at once, each with the processes that it started."""
        for child in self._children:
            # Also of one that has ended: something that it started may have outlived it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        for child in self._children:
            child.process.wait()
