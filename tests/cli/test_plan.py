from __future__ import annotations

import json
from pathlib import Path

import pytest

from spheroid_node.cli import main
from spheroid_node.cli.plan import _ranges
from spheroid_node.cli.sizes import decimal
from spheroid_node.run import RunSpec
from spheroid_node.training.plan import plan, traffic

SHAPE = ["plan", "--params", "75.8B", "--blocks", "24"]
RUN = """
name = "tiny"
[model]
blocks = 4
layers = 1
width = 64
heads = 2
window = 32
[round]
compression = "int8"
[learning]
lookahead = {lookahead}
conditioning = "{conditioning}"
"""


def run_file(tmp_path: Path, lookahead: float = 0.0, conditioning: str = "chain") -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(lookahead=lookahead, conditioning=conditioning))
    return file


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    assert main.run([*arguments, "--json"]) == 0
    figures: dict = json.loads(capsys.readouterr().out)  # type: ignore[type-arg]
    return figures


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """What is printed, in words."""
    assert main.run(list(arguments)) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str) -> None:
    file = run_file(tmp_path)
    run = RunSpec.from_toml(file)
    figures = report(capsys, "plan", "--run", str(file), "--device", device)
    assert (figures["run"], figures["run_id"]) == ("tiny", run.run_id)
    assert figures["worst_block"] == 3
    worker = figures["workers"]["worst_block"]
    assert worker["total"] == plan(run, 3, device).total == sum(worker["memory"].values())
    assert worker["sent"]["int8"] == traffic(run, 3).update < worker["sent"]["fp16"]
    assert worker["fetched"] == traffic(run, 3).versions
    assert figures["workers"]["full_replica"]["adamw"] > 2 * figures["workers"]["block_0"]["adamw"]
    assert [card["gib"] for card in figures["cards"]] == [8, 12, 16, 24, 48, 80]
    assert all(card["blocks"] == [0, 1, 2, 3] and card["full_replica"] for card in figures["cards"])


def test_the_last_block_but_one_is_worst_if_blocks_look_ahead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert report(capsys, "plan", "--run", str(run_file(tmp_path, lookahead=1.0)))["worst_block"] == 2


def test_a_large_shape_and_the_cards_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    figures = report(capsys, *SHAPE, "--window", "512", "--batch", "2")
    assert figures["parameters"]["all"] == pytest.approx(75.8e9, rel=0.01)
    assert (figures["model"]["window"], figures["batch"]) == (512, 2)
    by_size = {card["gib"]: card for card in figures["cards"]}
    assert by_size[24]["blocks"] == []
    assert not by_size[24]["context"] and by_size[48]["context"]
    assert 0 in by_size[80]["blocks"] and 23 not in by_size[80]["blocks"]
    assert not any(card["full_replica"] for card in figures["cards"])


def test_the_table_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    figures = report(capsys, *SHAPE)
    lines = table(capsys, *SHAPE)
    workers = figures["workers"].values()
    assert ["total", *(f"{worker['total'] / 2**30:,.2f}" for worker in workers)] in lines
    assert ["AdamW", "state", *(f"{worker['adamw'] / 2**30:,.2f}" for worker in workers)] in lines
    assert [
        "memory",
        "on",
        "cuda,",
        "GiB",
        "block",
        "0",
        "block",
        "23",
        "if",
        "context",
        "whole",
        "model",
    ] in lines
    assert ["80", "GiB", "0", "to", "2", "yes", "no"] in lines


def test_blocks_that_are_all_alike_have_one_column(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = table(capsys, "plan", "--run", str(run_file(tmp_path, conditioning="context")))
    assert ["memory", "on", "cuda,", "MiB", "any", "block", "whole", "model"] in lines
    assert ["8", "GiB", "yes", "yes"] in lines


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = table(capsys, *SHAPE)
    assert len(lines) == 3 + 6 + 6 + 8 + 6
    assert lines[-1][:2] == ["Of", "a"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give a run with --run, or a size with --params and --blocks"),
        (["--params", "1B"], "Give a run with --run, or a size with --params and --blocks"),
        (["--params", "abc", "--blocks", "3"], "'abc' is not a number of parameters, such as 124M or 75.8B"),
        (["--params", "-5M", "--blocks", "3"], "'-5M' is not a number"),
        (["--params", "1B", "--blocks", "0"], "--blocks"),
        (["--params", "1B", "--blocks", "2000"], "blocks: Input should be less than or equal to 1024"),
        (["--params", "100", "--blocks", "3"], "no such shape of 3 blocks has 100 parameters"),
        (
            ["--params", "9M", "--blocks", "3", "--width", "96", "--heads", "5"],
            "heads (5) must divide width (96)",
        ),
        (["--run", "run.toml", "--params", "1B", "--blocks", "3"], "leave out --params, --blocks"),
        (["--run", "missing.toml"], "missing.toml: No such file"),
        (["--params", "1B", "--blocks", "3", "--device", "abacus"], "abacus"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and said in output.err and output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("blocks", "said"),
    [([], "none"), ([0, 1, 2, 3], "any"), ([0], "0"), ([0, 1, 3], "0 to 1, 3"), ([1, 2], "1 to 2")],
)
def test_blocks_in_words(blocks: list[int], said: str) -> None:
    assert _ranges(blocks, 4) == said


@pytest.mark.parametrize(
    ("number", "unit", "said"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (75_343_315_968, "", "75.34 B"),
        (1000, "", "1.000 K"),
        (262_656, "B", "262.7 kB"),
        (10**15, "B", "1,000 TB"),
        (12, "B", "12 B"),
    ],
)
def test_numbers_in_decimal_units(number: int, unit: str, said: str) -> None:
    assert decimal(number, unit) == said
