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


def test_a_line_a_round_and_a_last_one(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regime = tmp_path / "nobody.toml"
    regime.write_text("stall = 1.0\nstall_slots = 0.4\nstall_spread = 0\n")
    assert main.run([*arguments, "--regime", str(regime)]) == 0
    heading, titles, *rounds, closing = capsys.readouterr().out.splitlines()
    assert "2 blocks, 2 workers, blocktrain" in heading
    assert "CE after each block" in titles
    assert [line.split()[0] for line in rounds] == ["0", "1"]
    assert all("0/4" in line for line in rounds)
    assert closing.startswith("participation 0% · CE 5.545")


def test_the_rounds_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    dry = ["simulate", "--dry", "--workers", "60", "--rounds", "2", "--regime", "wan"]
    assert main.run([*dry, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["regime"], summary["workers"], summary["ce_last"]) == ("wan", 60, None)
    assert 0.2 < summary["participation"] < 0.7
    assert main.run(dry) == 0
    heading, titles, *_, closing = capsys.readouterr().out.splitlines()
    assert "dry: nothing is learnt" in heading
    assert "CE" not in titles + closing
    # Also of a run, and then without its text.
    assert main.run([*arguments[:3], "--dry", "--rounds", "1"]) == 0
    assert "run tiny" in capsys.readouterr().out


def test_replicas_are_machines_a_block(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    alone = [word for word in arguments if word not in ("--workers", "2")] + ["2"]
    assert main.run([*alone, "--replicas", "3", "--dry", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == 6
    assert main.run([*arguments, "--replicas", "3"]) == 2
    assert "--workers and --replicas" in capsys.readouterr().err


def test_another_method_plays_another_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    summaries = {}
    for method in ("blocktrain", "end-to-end", "diloco"):
        assert main.run([*arguments, "--method", method, "--json"]) == 0
        summaries[method] = json.loads(capsys.readouterr().out)
    assert {name: summary["workers"] for name, summary in summaries.items()} == {
        "blocktrain": 2, "end-to-end": 1, "diloco": 2,
    }  # fmt: skip
    assert len({summary["digest"] for summary in summaries.values()}) == 3
    assert summaries["end-to-end"]["bytes_moved"] == 0
    assert [len(summaries["diloco"]["rounds"][0]["ce"]), summaries["diloco"]["method"]] == [1, "diloco"]


@pytest.mark.parametrize("method", ["blocktrain", "end-to-end", "diloco"])
def test_the_model_can_be_used_afterwards(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    place, text = str(tmp_path / "model"), arguments[4]
    assert main.run([*arguments, "--rounds", "3", "--method", method, "--export", place, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["run_id"] == summary["run"]
    assert config["evaluation"]["ce"] == summary["ce_last"]
    # Of a chain of two blocks the first is one version behind.
    newest = {"block-0": 2, "block-1": 3} if method == "blocktrain" else {"block-0": 3}
    assert config["versions"] == newest | {"interface": 3}
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"--method {method}" in card
    assert "no worker held the whole model" not in card
    assert f"| ce | {summary['ce_last']:.4f} |" in card

    assert main.run(["eval", "--checkpoint", place, "--data", text, "--windows", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ce"] == pytest.approx(summary["ce_last"], abs=1e-4)
    assert main.run(["generate", "the ", "--checkpoint", place, "--bytes", "8"]) == 0
    assert capsys.readouterr().out
    assert main.run([*arguments, "--export", place]) == 0  # over the earlier one
    closing, wrote = capsys.readouterr().out.splitlines()[-2:]
    assert closing.startswith("participation 100%")
    assert wrote == f"Wrote {place} (versions: block-0 1, block-1 2, interface 2)"


def test_a_folder_in_use_is_refused_before_anything_is_played(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*arguments, "--export", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "it holds other files, such as run.toml" in told.err


def test_without_learning_there_is_nothing_to_export(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*arguments, "--dry", "--export", str(tmp_path / "model")]) == 2
    assert "--dry learns nothing" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--regime", "lan", "lockstep, mild, wan, bad-edge"),
        ("--method", "sgd", "blocktrain, end-to-end, one-block, fedavg, local-sgd, diloco"),
    ],
)
def test_the_known_ones_are_listed(
    arguments: list[str], capsys: pytest.CaptureFixture[str], option: str, value: str, known: str
) -> None:
    assert main.run([*arguments, option, value]) == 2
    complaint = capsys.readouterr().err
    assert f"{option}: there is no" in complaint
    assert value in complaint
    assert known in complaint


def test_a_wrong_regime_file_is_named_with_its_key(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text("latency = -1\n")
    assert main.run([*arguments, "--regime", str(tmp_path / "mine.toml")]) == 2
    assert "mine.toml: latency" in capsys.readouterr().err


def test_too_few_workers_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments, "--workers", "1"]) == 2
    assert "--workers 1 is too few: this run has 2 blocks" in capsys.readouterr().err
