from __future__ import annotations

import json
from pathlib import Path

import pytest

from spheroid_node.cli import main

RUN = """
name = "tiny"
[model]
blocks = 2
layers = 1
width = 16
heads = 2
window = 16
[training]
local_steps = 3
batch = 2
[data]
name = "mine"
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A tiny run on a text of its own."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    run, text = str(tmp_path / "run.toml"), str(tmp_path / "text.txt")
    return ["simulate", "--run", run, "--data", text, "--workers", "2", "--rounds", "2"]


def test_the_same_command_prints_the_same(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed in ("3", "3", "4"):
        assert main.run([*arguments, "--seed", seed, "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    first, other = json.loads(printed[0]), json.loads(printed[2])
    assert first["digest"] != other["digest"]
    assert first["participation"] == 1.0
    assert [row["round"] for row in first["rounds"]] == [0, 1]
    assert first["rounds"][1]["bytes_moved"] == first["bytes_moved"] > 0


def test_a_line_a_round_and_a_last_one(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments, "--slow", "0.5"]) == 0
    heading, titles, *rounds, closing = capsys.readouterr().out.splitlines()
    assert "2 blocks, 2 workers" in heading
    assert "CE after each block" in titles
    assert [line.split()[0] for line in rounds] == ["0", "1"]
    assert all("2/4" in line for line in rounds)
    assert closing.startswith("participation 50%")


def test_too_few_workers_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments, "--workers", "1"]) == 2
    assert "--workers 1 is too few: this run has 2 blocks" in capsys.readouterr().err
