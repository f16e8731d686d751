from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spheroid_node.errors import RunMismatch, StateInUse, StateUnwritable
from spheroid_node.node.state import StateDirectory
from spheroid_node.run import RunSpec


def test_one_live_node_a_directory(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "state"), pytest.raises(StateInUse, match=r"in use by process \d+"):
        StateDirectory(tmp_path / "state").__enter__()
    with StateDirectory(tmp_path / "state"):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from spheroid_node.node.state import StateDirectory;"
        "StateDirectory(pathlib.Path(sys.argv[1])).__enter__(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    with StateDirectory(tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnwritable, match="file/state cannot be used"):
        StateDirectory(tmp_path / "file" / "state").__enter__()


def test_what_an_earlier_node_left_in_the_spool_is_removed(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "half an update").write_bytes(b"x")
    with StateDirectory(tmp_path) as state:
        assert not list(state.spool.iterdir())


def test_what_was_being_written_when_a_node_was_killed_is_removed(tmp_path: Path) -> None:
    """And nothing else: a state directory may be somebody's folder."""
    (tmp_path / "versions" / "block-0").mkdir(parents=True)
    left = [tmp_path / "versions" / "block-0" / ".00000003.safetensors.x1y2", tmp_path / ".run.msgpack.x1y2"]
    left += [tmp_path / ".optimiser-0.safetensors.x1y2", tmp_path / ".peers.json.x1y2"]
    other = [tmp_path / "versions" / "block-0" / "00000002.safetensors", tmp_path / ".git.config"]
    for file in left + other:
        file.write_bytes(b"x")
    with StateDirectory(tmp_path):
        assert not any(file.exists() for file in left)
        assert all(file.exists() for file in other)


def test_what_has_arrived_of_versions_of_another_block_is_removed(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        state.forget_partials({"block-1"})
        for group in ("block-0", "block-1"):
            state.partial(group).parent.mkdir(exist_ok=True)
            state.partial(group).write_bytes(b"x")
        state.forget_partials({"block-1"})
        assert [file.name for file in state.partial("").iterdir()] == ["block-1"]


def test_a_directory_belongs_to_one_run(tmp_path: Path, run: RunSpec) -> None:
    with StateDirectory(tmp_path) as state:
        state.bind(run)
        state.bind(run)
        other = run.model_copy(update={"seed": run.seed + 1})
        with pytest.raises(RunMismatch, match=run.run_id):
            state.bind(other)
        (tmp_path / "run.msgpack").write_bytes(b"\xc1")
        with pytest.raises(StateUnwritable, match="damaged"):
            state.bind(run)
