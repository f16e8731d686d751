"""The commands of README and quickstart, typed as they stand there, each after the other.

Left out are those for machines of other people (addresses of documentation), and `make` and `demo`, which
tests/fresh_clone.sh and test_demo.py run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spheroid_node.cli.demo.processes import Child
from spheroid_node.cli.parent import PARENT
from spheroid_node.config import LOOPBACK
from tests.test_docs import ROOT, command_lines

from .conftest import wait_for

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
LINES = [words[1:] for path in DOCUMENTS for words in command_lines(path.read_text()) if len(words) > 1]
BY_HAND = [
    words
    for words in LINES
    if words[0] in ("bootstrap", "join") and not {"--peer", "--announce", "--port"} & set(words)
]
CLIENTS = [
    words for words in LINES if words[0] in ("generate", "status", "eval", "export", "simulate", "plan")
]
LASTING = [words for words in LINES if words[0] == "gateway" or "--watch" in words]

pytestmark = pytest.mark.timeout(300)


@dataclass
class Terminal:
    """A folder and an environment in which the commands are typed."""

    folder: Path
    started: list[Child] = field(default_factory=list)

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "spheroid_node", *words],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # beside three trainers more threads only wait
            capture_output=True,
            text=True,
            timeout=200,
        )

    def start(self, name: str, words: list[str]) -> Child:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "spheroid_node", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.started.append(Child(name, log, process))
        return self.started[-1]

    def close(self) -> None:
        for child in self.started:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """The swarm that the quickstart starts by hand, in the folder of this fixture."""
    folder = tmp_path_factory.mktemp("terminal")
    shutil.copytree(ROOT / "bootstrap", folder / "bootstrap")
    terminal = Terminal(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPHEROID_HOST", LOOPBACK)
        patch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("XDG_STATE_HOME", str(folder / "home"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        try:
            assert [words[0] for words in BY_HAND] == ["bootstrap", "join", "join", "join"]
            bootstrap = terminal.start("bootstrap", BY_HAND[0])
            wait_for("the bootstrap", lambda: "bootstrap.started" in bootstrap.log.read_text())
            for number, words in enumerate(BY_HAND[1:]):
                terminal.start(f"join-{number}", words)
            wait_for("three blocks online", lambda: _online(terminal) == [0, 1, 2])
            yield terminal
        finally:
            terminal.close()


def _online(terminal: Terminal) -> list[int]:
    replicas = json.loads(terminal.run(["status", "--json"]).stdout)["replicas"]
    return sorted(replica["block"] for replica in replicas if replica["state"] == "online")


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=" ".join(words)) for words in CLIENTS if words not in LASTING],
)
def test_a_command_of_the_documents(terminal: Terminal, words: list[str]) -> None:
    done = terminal.run(words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "error" not in done.stderr.lower(), done.stderr
    if words[0] == "generate":
        length = int(words[words.index("--bytes") + 1]) if "--bytes" in words else 128
        assert len(done.stdout.encode(errors="replace")) >= length
    if words[0] == "export":
        assert (terminal.folder / words[1] / "model.safetensors").is_file()


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in LASTING])
def test_a_command_that_goes_on_until_ctrl_c(terminal: Terminal, words: list[str]) -> None:
    if "--port" in words:
        words = [*words[: words.index("--port") + 1], "0"]
    child = terminal.start("-".join(word.strip("-") for word in words), words)
    wait_for("its first words", lambda: len(child.log.read_text()) > 40 or None)
    assert child.process.poll() is None, child.last_line
    child.process.send_signal(signal.SIGINT)
    assert child.process.wait(timeout=30) in (0, 130)
    assert "Traceback" not in child.log.read_text()
