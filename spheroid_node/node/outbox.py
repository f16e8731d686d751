"""What a worker learnt and has not seen in a version yet, on disk: it survives the worker's end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog
from pydantic import BaseModel, FiniteFloat

from spheroid_node.errors import CheckpointInvalid
from spheroid_node.node.disk import Disk
from spheroid_node.rounds.contribution import Contributor, Kept
from spheroid_node.rounds.ledger import Settled, Shares, Submission
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import read_tensors, write_atomically, write_tensors
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import Receipt, UpdateHeader
from spheroid_node.wire.tensors import encoded_size, payload_digest

log = structlog.get_logger()

KEEP_ROUNDS = 10
"""What is older was learnt from a version that is too far back to be of use."""
INDEX_FILE = "index.safetensors"


class _Entry(BaseModel):
    """An update of a ledger; headers and digests are hex, here and below."""

    header: str
    contained: bool
    held: FiniteFloat
    parts: dict[str, FiniteFloat]


class _Index(BaseModel):
    """All but the updates themselves."""

    run: str
    group: str
    round: int
    header: str | None = None
    receipt: str | None = None
    parts: dict[str, FiniteFloat]
    ledger: list[_Entry]
    refused: bool

    def headers(self) -> list[UpdateHeader]:
        """Raises :class:`WireError`, :class:`ValueError`."""
        packed = [entry.header for entry in self.ledger] + ([] if self.header is None else [self.header])
        return [UpdateHeader.unpack(bytes.fromhex(header)) for header in packed]


class Saved(NamedTuple):
    """What was found on disk."""

    round: int
    """In which it was written."""
    kept: Kept


class Outbox:
    """A folder a group in ``directory``: updates as they are sent, and a small file that says what they are.

    An update does not change, so it is written once, before the first index that names it, and removed after
    the last. The index is replaced in one step: so at every moment either the old state is there or the new.
    """

    def __init__(self, run: RunSpec, directory: Path, disk: Disk | None = None) -> None:
        self._run, self._directory, self._disk = run, directory, disk or Disk()

    def save(self, group: str, kept: Kept, round: int) -> None:
        """As it is in ``round``. Never raises: a full disk costs what would be lost with the process."""
        index, folder = _index_of(self._run, group, kept, round), self._directory / group
        updates = [settled.submission for settled in kept.settled]
        if kept.submission is not None:
            updates.append(kept.submission)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for update in updates:
                path = folder / _file_name(update.header)
                if not path.exists():
                    write_atomically(path, update.payload)
            write_tensors(folder / INDEX_FILE, {}, {"index": index.model_dump_json()})
        except OSError as error:
            self._disk.failed("what was learnt", error)
        else:
            self._disk.wrote("what was learnt")
            _keep_only(folder, {INDEX_FILE, *(_file_name(update.header) for update in updates)})

    def restore(self, group: str, contributor: Contributor, round: int) -> Submission | None:
        """Go on in ``round`` from what was saved; returns the update that was open, if any.

        What does not fit is left aside, as if nothing had been saved.
        """
        folder = self._directory / group
        if not (folder / INDEX_FILE).exists():
            return None
        try:
            saved = read_outbox(folder, self._run, group, len(contributor.residual.vector))
            if round - saved.round > KEEP_ROUNDS:
                log.info("outbox.too_old", group=group, rounds=round - saved.round)
                return None
            contributor.resume(saved.kept)
        except (CheckpointInvalid, WireError) as error:
            log.error("outbox.damaged", group=group, file=str(folder / INDEX_FILE), cause=str(error))
            return None
        return saved.kept.submission

    def tidy(self, round: int) -> None:
        """Remove what a process that was killed had not finished, and groups that are damaged or too old."""
        with suppress(OSError):
            for folder in list(self._directory.iterdir()):
                if folder.is_dir():
                    _keep_only(folder, _names_at(folder, round))
                else:
                    folder.unlink()  # of a release that had a file a group


def read_outbox(folder: Path, run: RunSpec, group: str, elements: int) -> Saved:
    """What :meth:`Outbox.save` wrote into the folder of a group. Raises :class:`CheckpointInvalid`."""
    try:
        index = _read_index(folder)
        if (index.run, index.group) != (run.run_id, group):
            raise ValueError("it is of another run or group")
        ledger = tuple(
            Settled(
                _read_update(folder, entry.header, elements),
                entry.contained,
                entry.held,
                _from_hex(entry.parts),
            )
            for entry in index.ledger
        )
        submission = None if index.header is None else _read_update(folder, index.header, elements)
        receipt = None if index.receipt is None else Receipt.unpack(bytes.fromhex(index.receipt))
        kept = Kept(submission, receipt, _from_hex(index.parts), ledger, index.refused)
    except (WireError, OSError, ValueError) as error:
        raise CheckpointInvalid(str(folder), str(error)) from error
    return Saved(index.round, kept)


def _read_index(folder: Path) -> _Index:
    """Raises :class:`CheckpointInvalid`, :class:`ValueError`."""
    metadata, _ = read_tensors(folder / INDEX_FILE)
    return _Index.model_validate_json(metadata.get("index", ""))


def _index_of(run: RunSpec, group: str, kept: Kept, round: int) -> _Index:
    return _Index(
        run=run.run_id,
        group=group,
        round=round,
        header=None if kept.submission is None else kept.submission.header.pack().hex(),
        receipt=None if kept.receipt is None else kept.receipt.pack().hex(),
        parts=_as_hex(kept.parts),
        ledger=[
            _Entry(
                header=settled.submission.header.pack().hex(),
                contained=settled.contained,
                held=settled.held,
                parts=_as_hex(settled.parts),
            )
            for settled in kept.settled
        ],
        refused=kept.refused,
    )


def _read_update(folder: Path, packed: str, elements: int) -> Submission:
    """Raises :class:`OSError`, :class:`ValueError`, :class:`WireError`."""
    header = UpdateHeader.unpack(bytes.fromhex(packed))
    payload = (folder / _file_name(header)).read_bytes()
    if len(payload) != encoded_size(elements, header.dtype):
        raise ValueError("an update of another length")
    if payload_digest(payload) != header.digest:
        raise ValueError("an update that is not the one it was")
    return Submission(header, payload)


def _file_name(header: UpdateHeader) -> str:
    return f"{header.digest.hex()}.update"


def _names_at(folder: Path, round: int) -> set[str]:
    """Files of a group that are of use in ``round``."""
    with suppress(CheckpointInvalid, WireError, ValueError):
        index = _read_index(folder)
        if round - index.round <= KEEP_ROUNDS:
            return {INDEX_FILE, *map(_file_name, index.headers())}
    return set()


def _keep_only(folder: Path, names: set[str]) -> None:
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name not in names:
                path.unlink()
        if not names:
            folder.rmdir()


def _as_hex(shares: Shares) -> dict[str, float]:
    return {digest.hex(): share for digest, share in shares.items()}


def _from_hex(shares: Mapping[str, float]) -> Shares:
    return {bytes.fromhex(digest): share for digest, share in shares.items()}
