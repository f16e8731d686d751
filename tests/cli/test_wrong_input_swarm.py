"""Wrong input that only a swarm can find: against one real bootstrap that has no other node yet."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spheroid_node.cli.demo.shape import demo_run, to_toml

Spheroid = Callable[..., subprocess.CompletedProcess[str]]
Complaint = Callable[..., str]


@dataclass(frozen=True)
class Bootstrap:
    """A bootstrap that runs, and where it keeps its state."""

    pid: int
    address: str
    run: str
    state: Path
    run_file: Path

    @property
    def port(self) -> str:
        return self.address.split("/")[4]


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bootstrap]:
    folder = tmp_path_factory.mktemp("bootstrap")
    run = demo_run(time.time())
    (folder / "run.toml").write_text(to_toml(run))
    environment = os.environ | {"SPHEROID_RUNTIME_DIR": str(folder / "runtime"), "OMP_NUM_THREADS": "1"}
    places = ["--run", str(folder / "run.toml"), "--state-dir", str(folder / "state")]
    process = subprocess.Popen(
        [sys.executable, "-m", "spheroid_node", "bootstrap", *places, "--host", "127.0.0.1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # ends at once where the bootstrap fails
        assert line.startswith("spheroid-node join"), line
        assert (folder / "state" / "join.txt").read_text() == line
        (left,) = (folder / "runtime").iterdir()
        address = json.loads(left.read_text())["address"]
        assert line.split()[-1] == address and run.run_id in line
        yield Bootstrap(process.pid, address, run.run_id, folder / "state", folder / "run.toml")
    finally:
        process.terminate()
        process.wait(20)
    assert process.returncode == 0 and list((folder / "runtime").iterdir()) == []


@pytest.fixture
def refused_join(complaint: Complaint, bootstrap: Bootstrap, tmp_path: Path) -> Complaint:
    def run(exit_code: int, *arguments: str) -> str:
        state = ["--state-dir", str(tmp_path / "state"), "--host", "127.0.0.1"]
        return complaint(exit_code, "join", "--peer", bootstrap.address, *state, *arguments)

    return run


@pytest.mark.parametrize("block", ["7", "-1"])
def test_no_such_block(refused_join: Complaint, block: str) -> None:
    said = refused_join(2, "--block", block)
    assert f"no block {block}" in said and "0 to 2" in said and "--block auto" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("", "has 0 bytes"), ("short", "has 5 bytes; a window of this run needs")],
)
def test_data(refused_join: Complaint, tmp_path: Path, content: str | None, said: str) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_text(content)
    assert said in refused_join(2, "--block", "0", "--data", str(text))
    assert not (tmp_path / "state" / "versions").exists()


def test_port_of_another_libp2p_daemon(refused_join: Complaint, bootstrap: Bootstrap) -> None:
    said = refused_join(2, "--block", "0", "--port", bootstrap.port)
    assert f"Port {bootstrap.port} is already in use" in said and "--port" in said


def test_state_directory_of_a_live_node(complaint: Complaint, bootstrap: Bootstrap) -> None:
    arguments = ["--run", str(bootstrap.run_file), "--state-dir", str(bootstrap.state), "--host", "127.0.0.1"]
    said = complaint(2, "bootstrap", *arguments)
    assert str(bootstrap.state) in said and f"process {bootstrap.pid}" in said


def test_no_such_run(refused_join: Complaint) -> None:
    assert "do not know run 0123456789abcdef" in refused_join(3, "--run", "0123456789abcdef")


@pytest.mark.parametrize(
    ("prompt", "exit_code", "said"),
    [
        ("The", 3, "No live replica of block 0, 1, 2"),
        (65 * "x", 2, "has 65 bytes; the window of this run has 64"),
        ("", 2, "is empty"),
        ("caf\udce9", 2, "is not UTF-8"),
    ],
)
def test_generate(complaint: Complaint, bootstrap: Bootstrap, prompt: str, exit_code: int, said: str) -> None:
    assert said in complaint(exit_code, "generate", prompt, "--peer", bootstrap.address)


def test_status_is_loud_about_blocks_without_replica(spheroid: Spheroid, bootstrap: Bootstrap) -> None:
    process = spheroid("status", "--peer", bootstrap.address)
    assert process.returncode == 0 and process.stderr == ""
    assert "Block 1 has no live replica" in process.stdout
    process = spheroid("status", "--json", "--peer", bootstrap.address)
    shown = json.loads(process.stdout)
    assert (shown["run"], shown["blocks_without_replica"], shown["replicas"]) == (
        bootstrap.run,
        [0, 1, 2],
        [],
    )
