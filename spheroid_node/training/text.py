"""The text a worker trains on and the text it is measured on, as bytes.

Held-out text is never trained on: it is either given as files of its own, which are then left out of the
training files, or it is cut off the end before a single window is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spheroid_node.errors import DataMismatch, DataMissing, DataTooShort, DataUnavailable, ExtraMissing
from spheroid_node.run import DataSpec

PYTHON_DOCS = "python-docs"
"""The English documentation of the language that ships inside Python itself (pydoc_data.topics)."""

WIKITEXT = "wikitext-2"
HELD_OUT_SHARE = 0.05

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """Training and held-out bytes; ``sha256`` is of the training bytes as loaded, before any split."""

    name: str
    train: Bytes
    held_out: Bytes
    sha256: str


def load_text(data: DataSpec, paths: Sequence[str], held_out: Sequence[str], window: int) -> Text:
    """The text of a run, from ``paths`` (files or folders) or, without any, by the run's name for it.

    The path ``wikitext-2``, unless something of that name exists here, and a run's text of that name are
    fetched with the package ``datasets``. Without ``held_out`` the last 5 % are held out, and at least one
    window.

    Raises :class:`DataMissing`, :class:`DataTooShort`, :class:`DataUnavailable`, :class:`ExtraMissing`, and
    :class:`DataMismatch` when the run names another SHA-256 than that of the text.
    """
    held = _read(held_out) if held_out else None
    name, raw = data.name, b""
    if (not paths and data.name == WIKITEXT) or (list(paths) == [WIKITEXT] and not Path(WIKITEXT).exists()):
        name, (raw, validation) = WIKITEXT, _wikitext()
        held = validation if held is None else held
    elif paths:
        raw = _read(paths, without=held_out)
    elif data.name == PYTHON_DOCS:
        raw = _python_docs()
    else:
        raise DataMissing(data.name, "the run names this text, but nothing on this machine says where it is")

    sha256 = hashlib.sha256(raw).hexdigest()
    if data.sha256 and sha256 != data.sha256:
        raise DataMismatch(data.name, sha256, data.sha256)
    return _split(name, raw, held, sha256, window)


def sample_windows(train: Bytes, batch: int, window: int, generator: np.random.Generator) -> Tensor:
    """Windows at random places: int64 [batch, window + 1], inputs and, one further, targets."""
    starts = generator.integers(0, len(train) - window, size=batch)
    return _gather(train, starts, window)


def suffix_masks(share: float, batch: int, window: int, generator: np.random.Generator) -> Tensor:
    """Inputs that are not to be seen: bool [batch, window].

    With probability ``share`` those of a window from a random position on, never the first; else none.
    """
    starts = generator.integers(1, window, size=batch)
    starts[generator.random(batch) >= share] = window
    return torch.from_numpy(np.arange(window) >= starts[:, None])


def held_out_windows(held_out: Bytes, count: int, window: int) -> Tensor:
    """Evenly spaced windows, always the same ones: int64 [count, window + 1].

    Fewer than ``count`` where that many would overlap, so that no byte counts twice.
    """
    last = len(held_out) - window - 1
    count = max(1, min(count, len(held_out) // (window + 1)))
    starts = np.linspace(0, last, count).astype(np.int64)
    return _gather(held_out, starts, window)


def _gather(text: Bytes, starts: NDArray[np.int64], window: int) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(window + 1)].astype(np.int64))


def _split(name: str, raw: bytes, held: bytes | None, sha256: str, window: int) -> Text:
    needed = window + 1
    text = np.frombuffer(raw, dtype=np.uint8)
    if held is not None:
        train, rest = text, np.frombuffer(held, dtype=np.uint8)
    else:
        if len(text) < 2 * needed:
            raise DataTooShort("training and held-out", len(text), 2 * needed)
        cut = len(text) - max(needed, int(len(text) * HELD_OUT_SHARE))
        train, rest = text[:cut], text[cut:]
    for part, what in ((train, "training"), (rest, "held-out")):
        if len(part) < needed:
            raise DataTooShort(what, len(part), needed)
    return Text(name, train, rest, sha256)


def _read(paths: Iterable[str], without: Iterable[str] = ()) -> bytes:
    """All text at ``paths``, in a stable order and each file once, except that at ``without``."""
    seen = {file.resolve() for path in without for file, _ in _texts(path)}
    parts = []
    for path in paths:
        texts = list(_texts(path))
        fresh = [(file.resolve(), text) for file, text in texts if file.resolve() not in seen]
        if not fresh:
            cause = "all of it is held out or given twice" if texts else "the folder holds no UTF-8 text"
            raise DataMissing(path, cause)
        seen.update(file for file, _ in fresh)
        parts += [text for _, text in fresh]
    return b"\n".join(parts)


def _texts(path: str) -> Iterator[tuple[Path, bytes]]:
    """The file at ``path``, or the readable text files below it. Hidden and binary files are passed over."""
    root = Path(path).expanduser()
    if not root.exists():
        raise DataMissing(path, "no such file or folder")
    if not root.is_dir():
        yield root, _text_of(root)
        return
    for file in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if file.is_file() and not hidden:
            try:
                text = _text_of(file)
            except DataMissing:
                continue
            if text:
                yield file, text


def _text_of(file: Path) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise DataMissing(str(file), error.strerror or str(error)) from error
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataMissing(str(file), f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    if b"\x00" in text:
        raise DataMissing(str(file), "a binary file, not text")
    return text


def _python_docs() -> bytes:
    """The topics in order of name, each paragraph once.

    A fifth of them repeats other topics word for word; left in, held-out text would have been trained on.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataUnavailable(PYTHON_DOCS, "this Python was installed without its documentation") from error
    paragraphs = (part.rstrip() for topic in sorted(topics) for part in topics[topic].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def _wikitext() -> tuple[bytes, bytes]:
    """Training and validation bytes of the tokenised WikiText-2, as its authors' files have them."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ExtraMissing("datasets", "datasets") from error
    try:
        splits = [
            load_dataset("Salesforce/wikitext", "wikitext-2-v1", split=split)
            for split in ("train", "validation")
        ]
    except Exception as error:  # whatever the hub, the cache or the network raises means the same here
        raise DataUnavailable(WIKITEXT, f"{type(error).__name__}: {error}") from error
    # The hub stores a blank line, which is a space in the files, as an empty row.
    train, validation = ("".join(row or " \n" for row in split["text"]).encode() for split in splits)
    return train, validation
