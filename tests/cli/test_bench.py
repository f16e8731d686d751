from __future__ import annotations

import json
import re
from collections.abc import Callable

import psutil
import pytest
import torch

from spheroid_node.cli import main
from tests.cli.conftest import Spheroid
from tests.test_docs import DOCUMENTS, command_lines

SMALL = ["bench", "serve", "--logical", "440K", "--width", "64", "--blocks", "4", "--sweeps", "2"]
DOCUMENTED = [
    words[1:] for path in DOCUMENTS for words in command_lines(path.read_text("utf-8")) if "bench" in words
]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    assert main.run([*SMALL, *arguments, "--json"]) == 0
    figures: dict = json.loads(capsys.readouterr().out)  # type: ignore[type-arg]
    return figures


@pytest.mark.parametrize("positions", [1, 40])
def test_json(capsys: pytest.CaptureFixture[str], positions: int) -> None:
    found = report(capsys, "--positions", str(positions))
    shape = found["shape"]
    assert shape["parameters"] == pytest.approx(440_000, rel=0.01)
    model = shape["model"]
    assert (model["blocks"], model["layers"], model["width"], model["heads"]) == (4, 2, 64, 1)
    one_layer, beside = 12 * 64 * 64, (256 + 257 + 64) * 64
    size = {"bfloat16": 2, "float32": 4}[shape["dtype"]]
    assert shape["stored_bytes"] == pytest.approx(size * (one_layer + beside), rel=0.01)
    assert shape["threads"] == torch.get_num_threads()
    assert found["positions"] == positions and len(found["seconds"]) == 2
    low, high = sorted(found["seconds"])
    assert 1 / high <= found["sweeps_per_s"] <= 1 / low
    assert found["mb_per_s"] == pytest.approx(found["bytes_a_sweep"] * found["sweeps_per_s"] / 1e6)
    assert found["bytes_a_sweep"] > 3 * positions * 2 * 2 * 64
    spent = 4 * (found["compute_seconds"] + found["rest_seconds"])
    assert found["compute_seconds"] > 0 and spent == pytest.approx(1 / found["sweeps_per_s"], rel=0.01)
    assert found["peak_bytes"] > shape["stored_bytes"]


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+\.\d K parameters: 4 blocks of 2 layers, width 64, 1 heads", lines[0])
    assert re.fullmatch(r"\d+\.\d+ kB stored, one layer in (bfloat16|float32); .*", lines[1])
    assert re.fullmatch(r"sweeps of 1 position +2", lines[2])
    titles = ["sweeps/s", "bytes/s decided", "frames", "frames of a sweep", "a hop computes",
              "transport and scheduling", "memory, at most"]  # fmt: skip
    assert [re.split("  +", line)[0] for line in lines[3:]] == titles
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing option '--logical'"),
        (["--logical", "3X"], "'3X' is not a number of parameters, such as 124M or 75.8B"),
        (["--logical", "0"], "no such shape of 3 blocks has 0 parameters"),
        (["--logical", "100T"], "no such shape of 3 blocks has 100,000,000,000,000 parameters"),
        (["--logical", "3M", "--blocks", "0"], "--blocks"),
        (["--logical", "3M", "--blocks", "2000"], "blocks: Input should be less than or equal to 1024"),
        (["--logical", "3M", "--width", "0"], "--width"),
        (["--logical", "3M", "--width", "65"], "width / heads (1) must be even"),
        (["--logical", "3M", "--width", "40000"], "width: Input should be less than or equal to 32768"),
        (["--logical", "3M", "--width", "1024"], "no such shape of 3 blocks has 3,000,000 parameters"),
        (["--logical", "5M", "--positions", "0"], "--positions"),
        (["--logical", "5M", "--sweeps", "0"], "--sweeps"),
        (["--logical", "5M", "--positions", "9000", "--sweeps", "8"], "a text of 81,000 positions"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "serve", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and said in output.err and output.err.count("\n") == 1


def test_too_little_memory_is_told_before_any_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = psutil.virtual_memory()._replace(available=8 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert main.run(["bench", "serve", "--logical", "75.8B", "--blocks", "9", "--width", "18432"]) == 2
    said = capsys.readouterr().err
    assert "one layer of width 18432 takes" in said and "8.000 GB of memory are free" in said


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in DOCUMENTED])
def test_a_command_of_the_documents(spheroid: Spheroid, words: list[str]) -> None:
    done = spheroid(*words)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "sweeps/s" in done.stdout


def test_a_command_is_documented() -> None:
    assert DOCUMENTED


def test_the_group_alone_lists_what_it_can_do(complaint: Callable[..., str], spheroid: Spheroid) -> None:
    assert "serve" in spheroid("bench").stderr
    assert "No such command 'train'" in complaint(2, "bench", "train")
