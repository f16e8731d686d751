import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Spheroid = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing of this machine's own set-up is found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPHEROID_", "XDG_"))}
    return kept | {
        "HOME": str(tmp_path / "home"),
        "SPHEROID_RUNTIME_DIR": str(tmp_path / "runtime"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def spheroid(environment: dict[str, str], tmp_path: Path) -> Spheroid:
    """Runs ``spheroid-node`` as a process of its own, in an empty folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "here").mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "spheroid_node", *arguments],
            cwd=tmp_path / "here",
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def complaint(spheroid: Spheroid) -> Callable[..., str]:
    """Runs ``spheroid-node``, which must leave with the exit code and one line on stderr: this line."""

    def run(exit_code: int, *arguments: str, **variables: str) -> str:
        process = spheroid(*arguments, **variables)
        assert process.returncode == exit_code, process.stderr
        assert process.stdout == ""
        assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1, process.stderr
        return process.stderr

    return run
