"""Wrong input, as a user meets it: a process, one line on stderr, exit code 2 or 3, nothing half written."""

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from spheroid_node.cli.demo.shape import demo_run, to_toml

Complaint = Callable[..., str]
PEER = "12D3KooWA1b2sZcF1uDmeVQ9GhQ2MkUgW8vE1bD8kz4VqT2yVLQe"


def below(*directories: Path) -> list[Path]:
    return [file for directory in directories for file in sorted(directory.rglob("*"))]


def run_file(path: Path, *replacements: tuple[str, str]) -> str:
    text = to_toml(demo_run(0.0))
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def unused_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}/p2p/{PEER}"


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["join", "--block", "0"], ["status"], ["eval"], ["export", "model"], ["generate", "The"]]
)
def test_no_peers_known(complaint: Complaint, tmp_path: Path, arguments: list[str]) -> None:
    said = complaint(2, *arguments)
    assert all(word in said for word in ("--peer", "SPHEROID_PEERS", "config file", "bootstrap"))
    assert below(tmp_path / "here", tmp_path / "home") == []


def test_malformed_address(complaint: Complaint, tmp_path: Path) -> None:
    said = complaint(2, "join", "--peer", "seed.example.org:31337")
    assert "'seed.example.org:31337'" in said and "must begin with /" in said and "bootstrap" in said
    said = complaint(2, "status", SPHEROID_PEERS="/ip4/1.2.3/tcp/1/p2p/x")
    assert "'1.2.3' is not an address" in said
    assert below(tmp_path / "here", tmp_path / "home") == []


@pytest.mark.parametrize("command", [["join", "--block", "0", "--host", "127.0.0.1"], ["status"]])
def test_unreachable_bootstrap(complaint: Complaint, command: list[str]) -> None:
    address = unused_address()
    said = complaint(3, *command, "--peer", address)
    assert address in said and "firewall" in said


# --- the run file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replacement", "said"),
    [
        (("[model]", "[model]\ndepth = 4"), "model.depth: Extra inputs are not permitted"),
        (("sigma_min = 1.0", "sigma_min = -1.0"), "noise.sigma_min: Input should be greater than 0"),
        (("heads = 4", "heads = 5"), "heads (5) must divide width (96)"),
        (("[model]", "[model"), "line"),
    ],
)
def test_run_file(complaint: Complaint, tmp_path: Path, replacement: tuple[str, str], said: str) -> None:
    file = run_file(tmp_path / "run.toml", replacement)
    complained = complaint(2, "bootstrap", "--run", file)
    assert file in complained and said in complained
    assert below(tmp_path / "here", tmp_path / "home") == []


def test_no_run_file(complaint: Complaint) -> None:
    assert "missing.toml: No such file" in complaint(2, "bootstrap", "--run", "missing.toml")


# --- this machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--port", "--data-port"])
def test_no_port(complaint: Complaint, option: str) -> None:
    assert option in complaint(2, "join", "--peer", unused_address(), option, "70000")


def test_port_of_the_bootstrap_in_use(complaint: Complaint, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        file = run_file(tmp_path / "run.toml")
        said = complaint(2, "bootstrap", "--run", file, "--host", "127.0.0.1", "--port", port)
    assert f"Port {port} is already in use" in said


def test_state_directory_in_use(complaint: Complaint, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT)
    try:
        os.write(lock, b"process 4711\n")
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = complaint(2, "join", "--peer", unused_address(), "--state-dir", str(state))
    finally:
        os.close(lock)
    assert str(state) in said and "in use by process 4711" in said
    assert below(state) == [state / "lock"]


def test_state_directory_unwritable(complaint: Complaint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = tmp_path / "file" / "state"
    said = complaint(2, "join", "--peer", unused_address(), "--state-dir", str(state))
    assert str(state) in said and "Not a directory" in said


# --- data, models and prompts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("", "has 0 bytes"), ("short", "has 5 bytes; a window of this run needs")],
)
def test_demo_data(complaint: Complaint, tmp_path: Path, content: str | None, said: str) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_text(content)
    assert said in complaint(2, "demo", "--data", str(text))
    assert below(tmp_path / "here", tmp_path / "home") == []


def test_demo_prompts(complaint: Complaint, tmp_path: Path) -> None:
    assert "is empty" in complaint(2, "demo", "--prompt", "")
    assert "has 65 bytes; the window of this run has 64" in complaint(2, "demo", "--prompt", 65 * "x")
    assert below(tmp_path / "here", tmp_path / "home") == []


def test_demo_output(complaint: Complaint, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    assert "it is not empty" in complaint(2, "demo", "--output", str(tmp_path / "full"))
    assert below(tmp_path / "full") == [tmp_path / "full" / "thesis.tex"]


def test_checkpoint_without_a_model(complaint: Complaint, tmp_path: Path) -> None:
    said = complaint(2, "eval", "--checkpoint", str(tmp_path))
    assert str(tmp_path) in said and "export" in said


def test_export_over_other_files(complaint: Complaint, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    said = complaint(2, "export", str(tmp_path), "--peer", unused_address())
    assert "other files" in said
