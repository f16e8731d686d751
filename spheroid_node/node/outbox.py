"""What a worker learnt and has not seen in a version yet, on disk: it survives the worker's end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from pydantic import BaseModel, FiniteFloat, TypeAdapter

from spheroid_node.errors import CheckpointInvalid, RunMismatch
from spheroid_node.node.disk import Disk
from spheroid_node.rounds.contribution import Contributor, Kept
from spheroid_node.rounds.ledger import Ledger, Settled, Shares, Submission
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import read_tensors, write_tensors
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import Receipt, UpdateHeader
from spheroid_node.wire.tensors import Vector, encoded_size

log = structlog.get_logger()

KEEP_ROUNDS = 10
"""What is older was learnt from a version that is too far back to be of use."""


class _Settled(BaseModel):
    """An entry of a ledger, beside its payload; digests and headers are hex."""

    header: str
    contained: bool
    held: FiniteFloat
    parts: dict[str, FiniteFloat]


_LEDGER = TypeAdapter(list[_Settled])
_SHARES = TypeAdapter(dict[str, FiniteFloat])


class Outbox:
    """A file a group in ``directory``, which is written as a whole or not at all."""

    def __init__(self, run: RunSpec, directory: Path, disk: Disk | None = None) -> None:
        self._run, self._directory, self._disk = run, directory, disk or Disk()

    def save(self, group: str, kept: Kept, round: int) -> None:
        """As it is in ``round``. Never raises: a full disk costs what would be lost with the process."""
        tensors = {"residual": kept.residual}
        metadata = {"run": self._run.run_id, "group": group, "round": str(round)}
        if kept.refused:
            metadata["refused"] = "yes"
        if kept.submission is not None and kept.sent is not None:
            tensors["sent"] = kept.sent
            tensors["payload"] = np.frombuffer(kept.submission.payload, dtype=np.uint8)
            metadata["header"] = kept.submission.header.pack().hex()
            metadata["parts"] = _SHARES.dump_json(_as_hex(kept.parts)).decode()
        if kept.receipt is not None:
            metadata["receipt"] = kept.receipt.pack().hex()
        for place, settled in enumerate(kept.settled):
            tensors[f"settled-{place}"] = np.frombuffer(settled.submission.payload, dtype=np.uint8)
        metadata["ledger"] = _LEDGER.dump_json([_entry(settled) for settled in kept.settled]).decode()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_tensors(self._path(group), tensors, metadata)
        except OSError as error:
            self._disk.failed("what was learnt", error)
        else:
            self._disk.wrote("what was learnt")

    def restore(self, group: str, contributor: Contributor, round: int) -> Submission | None:
        """Go on in ``round`` from what was saved; returns the update that was open, if any.

        A file that does not fit is left aside, as if nothing had been saved.
        """
        path = self._path(group)
        if not path.exists():
            return None
        try:
            saved, kept = self._read(path, group, len(contributor.residual.vector))
        except (CheckpointInvalid, RunMismatch, WireError, KeyError, ValueError) as error:
            log.error("outbox.damaged", group=group, file=str(path), cause=str(error))
            return None
        if round - saved > KEEP_ROUNDS:
            log.info("outbox.too_old", group=group, rounds=round - saved)
            return None
        contributor.resume(kept)
        return kept.submission

    def _read(self, path: Path, group: str, elements: int) -> tuple[int, Kept]:
        """The round it was saved in, and what was kept."""
        metadata, tensors = read_tensors(path)
        if (metadata.get("run"), metadata.get("group")) != (self._run.run_id, group):
            raise ValueError("it is of another run or group")
        residual, sent, submission, receipt = tensors["residual"], None, None, None
        parts: Shares = {}
        if "header" in metadata:
            submission = _submission(metadata["header"], tensors["payload"], elements)
            sent, parts = tensors["sent"], _from_hex(_SHARES.validate_json(metadata["parts"]))
        if "receipt" in metadata:
            receipt = Receipt.unpack(bytes.fromhex(metadata["receipt"]))
        for vector in (residual, sent):
            if vector is not None and (vector.shape != (elements,) or vector.dtype != np.float32):
                raise ValueError("vectors of another shape")
        ledger = read_ledger(metadata, tensors, elements)
        refused = "refused" in metadata
        return int(metadata["round"]), Kept(residual, sent, submission, receipt, parts, ledger, refused)

    def _path(self, group: str) -> Path:
        return self._directory / f"{group}.safetensors"


def read_ledger(metadata: Mapping[str, str], tensors: Mapping[str, Any], elements: int) -> Ledger:
    """Of a file that was read. Raises :class:`KeyError`, :class:`ValueError`, :class:`WireError`."""
    return tuple(
        Settled(
            _submission(entry.header, tensors[f"settled-{place}"], elements),
            entry.contained,
            entry.held,
            _from_hex(entry.parts),
        )
        for place, entry in enumerate(_LEDGER.validate_json(metadata["ledger"]))
    )


def _entry(settled: Settled) -> _Settled:
    header = settled.submission.header.pack().hex()
    return _Settled(
        header=header, contained=settled.contained, held=settled.held, parts=_as_hex(settled.parts)
    )


def _as_hex(shares: Shares) -> dict[str, float]:
    return {digest.hex(): share for digest, share in shares.items()}


def _from_hex(shares: Mapping[str, float]) -> Shares:
    return {bytes.fromhex(digest): share for digest, share in shares.items()}


def _submission(header: str, payload: Vector, elements: int) -> Submission:
    """Raises :class:`WireError`, :class:`ValueError`."""
    found = Submission(UpdateHeader.unpack(bytes.fromhex(header)), payload.tobytes())
    if len(found.payload) != encoded_size(elements, found.header.dtype):
        raise ValueError("an update of another length")
    return found
