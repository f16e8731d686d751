from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spheroid_node.errors import DataMismatch, DataMissing, DataTooShort, DataUnavailable, ExtraMissing
from spheroid_node.run import DataSpec
from spheroid_node.training.text import Text, held_out_windows, load_text, sample_windows

WINDOW = 16
ANY = DataSpec(name="anything")


def load(*paths: Path | str, held_out: tuple[Path, ...] = (), data: DataSpec = ANY) -> Text:
    return load_text(data, [str(path) for path in paths], [str(path) for path in held_out], WINDOW)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_end_of_one_file_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(32, 127)) * 20
    text = load(write(tmp_path / "a.txt", content))
    assert text.sha256 == hashlib.sha256(content).hexdigest()
    assert text.train.tobytes() + text.held_out.tobytes() == content
    assert len(text.held_out) == len(content) * 5 // 100


def test_at_least_one_window_is_held_out(tmp_path: Path) -> None:
    text = load(write(tmp_path / "a.txt", "x" * 40))
    assert (len(text.train), len(text.held_out)) == (40 - 17, 17)


def test_held_out_files_are_left_out_of_a_folder_and_all_of_it_is_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "text" / "train.txt", "train " * 10)
    valid = write(tmp_path / "text" / "valid.txt", "valid " * 10)
    text = load(tmp_path / "text", held_out=(valid,))
    assert text.train.tobytes() == b"train " * 10
    assert text.held_out.tobytes() == b"valid " * 10


def test_a_folder_is_read_in_order_without_what_is_binary_or_hidden(tmp_path: Path) -> None:
    write(tmp_path / "b.md", "second" * 4)
    write(tmp_path / "a" / "z.py", "first" * 4)
    write(tmp_path / "c.bin", b"\xff\xfe\x00")
    write(tmp_path / "d.dat", b"text\x00with a zero")
    write(tmp_path / ".git" / "config", "hidden" * 9)
    write(tmp_path / "e.txt", "")
    text = load(tmp_path)
    assert text.train.tobytes() + text.held_out.tobytes() == b"first" * 4 + b"\n" + b"second" * 4


def test_a_file_given_twice_counts_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "once " * 20)
    write(tmp_path / "b.txt", "more")
    assert load(file, tmp_path).sha256 == hashlib.sha256(b"once " * 20 + b"\nmore").hexdigest()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    binary = write(tmp_path / "binary", b"\xff\xfe")
    file = write(tmp_path / "a.txt", "text" * 30)
    for path, cause in (
        (tmp_path / "missing", "no such file"),
        (tmp_path / "empty", "no UTF-8 text"),
        (binary, "not UTF-8"),
    ):
        with pytest.raises(DataMissing, match=cause) as caught:
            load(path)
        assert str(path) in str(caught.value)
    with pytest.raises(DataMissing, match="held out"):
        load(file, held_out=(file,))
    with pytest.raises(DataMissing, match="anything"):
        load()


@pytest.mark.parametrize("size", [0, 1, 33])
def test_text_that_is_too_short_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(DataTooShort, match=f"{size} bytes.*34"):
        load(write(tmp_path / "a.txt", "x" * size))
    assert len(load(write(tmp_path / "b.txt", "x" * 34)).held_out) == 17


def test_held_out_files_that_are_too_short_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataTooShort, match="held-out text has 16 bytes"):
        load(write(tmp_path / "a", "x" * 50), held_out=(write(tmp_path / "b", "x" * 16),))


def test_another_text_than_the_runs_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text" * 30)
    right = DataSpec(name="right", sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    assert load(file, data=right).sha256 == right.sha256
    with pytest.raises(DataMismatch, match="wrong"):
        load(file, data=DataSpec(name="wrong", sha256="0" * 64))


def test_the_embedded_text_holds_no_paragraph_twice() -> None:
    text = load_text(DataSpec(), [], [], 128)
    train, held_out = text.train.tobytes().decode(), text.held_out.tobytes().decode()
    assert len(train) > 200_000
    long = [part for part in held_out.split("\n\n")[1:] if len(part) > 80]
    assert len(long) > 20
    assert not [part for part in long if part in train.split("\n\n")]


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset: object) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize("paths", [("wikitext-2",), ()])
def test_wikitext_comes_from_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paths: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_datasets(monkeypatch, lambda *_, split: {"text": [f"{split} ", "é" * 20]})
    text = load(*paths, data=DataSpec(name="wikitext-2"))
    assert text.train.tobytes().decode() == "train " + "é" * 20
    assert text.held_out.tobytes().decode() == "validation " + "é" * 20


def test_wikitext_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def offline(*_: object, split: str) -> object:
        raise ConnectionError("no route")

    fake_datasets(monkeypatch, offline)
    with pytest.raises(DataUnavailable, match="no route"):
        load("wikitext-2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissing, match=r"spheroid-node\[datasets\]"):
        load("wikitext-2")


def test_a_folder_called_wikitext_2_is_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "wikitext-2" / "a.txt", "x" * 50)
    assert len(load("wikitext-2").train) == 50 - 17


def test_windows_are_runs_of_the_text_and_reach_both_ends() -> None:
    train = np.arange(WINDOW + 3, dtype=np.uint8)
    windows = sample_windows(train, 200, WINDOW, np.random.default_rng(0))
    assert windows.shape == (200, WINDOW + 1)
    assert windows.dtype == torch.int64
    assert (windows.diff(dim=1) == 1).all()
    assert set(windows[:, 0].tolist()) == {0, 1, 2}
    assert sample_windows(train[: WINDOW + 1], 1, WINDOW, np.random.default_rng(0)).shape == (1, WINDOW + 1)


def test_held_out_windows_span_the_text_evenly_and_do_not_overlap() -> None:
    held_out = np.arange(250, dtype=np.uint8)
    windows = held_out_windows(held_out, 5, WINDOW)
    assert windows.shape == (5, WINDOW + 1)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 249
    assert torch.equal(windows, held_out_windows(held_out, 5, WINDOW))
    many = held_out_windows(held_out, 1000, WINDOW)
    assert len(many.unique()) == many.numel() == 14 * 17
    assert held_out_windows(held_out[:17], 3, WINDOW).shape == (1, 17)
