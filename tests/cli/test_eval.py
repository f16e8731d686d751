"""``eval`` on an exported model: its figures, its picture, and its answers to wrong input."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from spheroid_node.cli import eval as evaluation
from spheroid_node.cli import main
from spheroid_node.errors import OutputUnwritable
from spheroid_node.model import load
from spheroid_node.model.parameters import flatten, group_module
from spheroid_node.training.checkpoint import export_model
from spheroid_node.training.diagnosis import Diagnosis, diagnose
from spheroid_node.training.evaluation import Evaluation
from spheroid_node.training.text import held_out_windows
from tests.serving.memory import small_model

KEYS = {"ce_by_block", "ce", "ce_mean_log_probs", "perplexity", "bits_per_byte", "bytes"}
"""What programs have read since the first version."""

Evaluate = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exported models, and a text."""
    folder = tmp_path_factory.mktemp("eval")
    for denoiser in ("evidence", "edm"):
        model = small_model(denoiser=denoiser)
        vectors = {group: flatten(group_module(model, group)) for group in model.run.groups}
        export_model(folder / denoiser, model.run, vectors, dict.fromkeys(model.run.groups, 3))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return folder


@pytest.fixture
def evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Runs ``eval`` on a model of ``folder`` and returns what it prints."""

    def run(model: str, *arguments: str) -> str:
        options = [
            "--checkpoint",
            str(folder / model),
            "--held-out",
            str(folder / "text.txt"),
            "--windows",
            "5",
        ]
        # The training text has to differ from the held-out one, and nobody reads it.
        assert main.run(["eval", *options, "--data", __file__, *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_json_has_every_figure(evaluate: Evaluate, folder: Path) -> None:
    printed = json.loads(evaluate("evidence", "--json", "--seed", "4"))
    model = load(folder / "evidence")
    held_out = (folder / "text.txt").read_bytes()
    windows = held_out_windows(np.frombuffer(held_out, dtype=np.uint8), 5, 24)
    expected = diagnose(model, windows, seed=4)
    assert set(printed) > KEYS
    assert printed["ce_by_block"] == pytest.approx(expected.from_noise.ce, abs=1e-6)
    assert printed["ce"] == pytest.approx(expected.from_noise.ce_readout, abs=1e-6)
    assert printed["bytes"] == 5 * 24
    for name in (
        "ce_alone",
        "ce_at_sigma_max",
        "sigma_local",
        "ce_local",
        "ce_local_posterior",
        "ce_scrambled",
    ):
        assert printed[name] == pytest.approx(getattr(expected, name), abs=1e-6)
    for name in ("ce_mean_last_two", "ce_scrambled_readout", "seed", "leaking"):
        assert printed[name] == pytest.approx(getattr(expected, name), abs=1e-6)


def test_the_seed_is_of_the_noise(evaluate: Evaluate) -> None:
    printed = [evaluate("edm", "--json", *seed) for seed in ((), ("--seed", "0"), ("--seed", "1"))]
    assert printed[0] == printed[1]
    assert json.loads(printed[0])["ce_by_block"] != json.loads(printed[2])["ce_by_block"]


@pytest.mark.parametrize(("model", "columns"), [("evidence", 6), ("edm", 5)])
def test_a_line_a_block_and_a_line_a_readout(evaluate: Evaluate, model: str, columns: int) -> None:
    figures = json.loads(evaluate(model, "--json"))
    lines = evaluate(model).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("Leakage"))
    rows = [line.split() for line in lines if re.match(r"^\d+ ", line)]
    assert [int(row[0]) for row in rows] == [0, 1, 2]
    measures = ["ce_by_block", "ce_alone", "ce_at_sigma_max", "ce_local", "ce_local_posterior"][: columns - 1]
    for block, row in enumerate(rows):
        assert row[1:-1] == [f"{figures[name][block]:.4f}" for name in measures]
        assert float(row[-1]) == pytest.approx(figures["sigma_local"][block], rel=0.01)
    text = "\n".join(lines)
    for name in ("ce", "ce_mean_log_probs", "ce_mean_last_two", "ce_scrambled_readout"):
        assert f"  {figures[name]:.4f}" in text
    assert lines[-1].startswith("Leakage in block" if figures["leaking"] else "No local CE is far below")


def test_leakage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    noise = Evaluation.of([2.0, 3.0], 3.0, 2.5, 10)
    found = Diagnosis(
        noise, 2.4, [2.0, 3.1], [2.0, 3.0], [5.0, 2.0], [1.9, 0.1], [1.9, 0.1], [5.0, 5.0], 5.0, 0
    )
    evaluation._print(found, small_model().run)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Leakage in block 1: a local CE far below the one from noise means")


# --- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["evidence", "edm"])
def test_a_png(evaluate: Evaluate, tmp_path: Path, model: str) -> None:
    from matplotlib.image import imread

    file = tmp_path / "blocks.png"
    assert evaluate(model, "--plot", str(file)).splitlines()[-1] == f"Wrote {file}"
    pixels = imread(file)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1000
    assert len({tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, pixels.shape[-1]).round(1)}) > 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["blocks.png"]


def test_an_svg_with_every_measure(evaluate: Evaluate, tmp_path: Path) -> None:
    file = tmp_path / "blocks.SVG"
    printed = evaluate("evidence", "--json", "--plot", str(file))
    json.loads(printed)
    drawn = file.read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    words = ("from noise", "alone", "σ_max = 10", "local", "posterior", "nats a byte", "scrambled")
    assert [word for word in words if word not in drawn] == []
    evaluate("evidence", "--json", "--plot", str(file))
    assert file.read_text() == drawn


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "blocks.pdf"], "'blocks.pdf' must end in .png or .svg"),
        (["--plot", "blocks"], "must end in .png or .svg"),
        (["--plot", "missing/blocks.png"], "Cannot write missing/blocks.png: No such file"),
        (["--plot", "file/blocks.png"], "Cannot write file/blocks.png: Not a directory"),
        (["--plot", "folder.png"], "Cannot write folder.png: it is a directory"),
        (["--seed", "-1"], "'--seed'"),
        (["--windows", "0"], "'--windows'"),
        (["--checkpoint", "missing"], "No model could be loaded from missing"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert main.run(["eval", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and said in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:  # a folder's mode would not keep root out
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OutputUnwritable, match="Permission denied"):
        evaluation.check_writable(tmp_path / "blocks.png")


def test_a_folder_that_goes_while_it_measures(tmp_path: Path) -> None:
    with pytest.raises(OutputUnwritable, match="No such file"):
        evaluation.write_figure(tmp_path / "gone" / "blocks.png", b"image")


def test_wrong_input_as_a_process_of_its_own(complaint: Callable[..., str]) -> None:
    assert "must end in .png or .svg" in complaint(2, "eval", "--plot", "blocks.jpg")
