import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from spheroid_node.cli import main
from spheroid_node.errors import NetworkError

PROBE = """
import sys
from spheroid_node.cli.main import run
code = run(sys.argv[1:])
heavy = {"torch", "hivemind", "numpy", "matplotlib"} & set(sys.modules)
print("HEAVY", sorted(heavy), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("command", [[], *([name] for name in main.COMMANDS)], ids=lambda name: "".join(name))
def test_help_imports_nothing_heavy(command: list[str], environment: dict[str, str]) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROBE, *command, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"Usage: spheroid-node{' ' if command else ''}{''.join(command)}")
    assert process.stderr == "HEAVY []\n"


def test_every_command_is_listed_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    listing = " ".join(capsys.readouterr().out.split())
    assert all(name in listing and line in listing for name, line in main.COMMANDS.items())


def failing(error: BaseException) -> click.Command:
    @click.command("status")
    def command() -> None:
        raise error

    return command


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(error: BaseException) -> int:
        monkeypatch.setattr(main.LazyCommands, "get_command", lambda *_: failing(error))
        return main.run(["status"])

    return run


def test_an_error_of_ours_is_one_line_with_its_exit_code(fail_with, capsys) -> None:  # type: ignore[no-untyped-def]
    assert fail_with(NetworkError("The first line\nand the second", "Try again")) == 3
    assert capsys.readouterr().err == "error: The first line and the second. Try again.\n"


def test_a_bug_is_one_line_and_a_file_with_the_traceback(fail_with, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert fail_with(ZeroDivisionError("oh")) == 1
    error = capsys.readouterr().err
    (file,) = (tmp_path / "spheroid-node").iterdir()
    assert error.startswith("error: ZeroDivisionError: oh.") and str(file) in error and error.count("\n") == 1
    assert "Traceback" in file.read_text()


def test_an_interrupt_leaves_with_130_and_says_nothing(fail_with, capsys) -> None:  # type: ignore[no-untyped-def]
    assert fail_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "No such command 'frobnicate'. See `spheroid-node --help`."),
        (["status", "--frobnicate"], "See `spheroid-node status --help`."),
        (["join", "--block", "two"], "'two' is neither the number of a block nor auto"),
        (["bootstrap"], "Missing option '--run'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "spheroid_node", "--help"], stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert process.stderr == b"" and process.returncode == 1
