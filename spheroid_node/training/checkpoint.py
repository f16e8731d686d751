"""Versions on disk and exported models: safetensors, written whole or not at all.

A file appears under its name only after every byte of it has reached the disk, so a crash or a full disk
leaves the file that was there before. What is read is checked against the checksum it was stored with.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from spheroid_node.errors import CheckpointInvalid, ModelInvalid, OutputUnwritable, RunMismatch
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import elements, named_tensors, vector_of
from spheroid_node.rounds.outer import payload_elements
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.training.card import BY_A_SWARM, model_card
from spheroid_node.wire.tensors import Vector, vector_digest

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
CHECKSUM = "checksum"
MOMENTUM = "momentum:"
"""Before the names of the parameters that a version's momentum belongs to."""


@dataclass(frozen=True)
class StoredVersion:
    """A version of a group as it was stored, and its signed manifest (maybe empty)."""

    version: int
    payload: Vector
    """Parameters and, where the run's outer step has one, momentum (rounds/outer.py)."""
    manifest: bytes


def write_version(
    path: Path, run: RunSpec, group: str, version: int, payload: Vector, manifest: bytes = b""
) -> None:
    """Store a version of a group. Raises :class:`OSError`, and then nothing has changed on disk."""
    parameters, momentum = np.split(payload, [elements(run, group)])
    tensors = named_tensors(run, group, parameters)
    if len(momentum):
        tensors |= {MOMENTUM + name: tensor for name, tensor in named_tensors(run, group, momentum).items()}
    metadata = {
        "run": run.run_id,
        "group": group,
        "version": str(version),
        "digest": vector_digest(payload).hex(),
        "manifest": manifest.hex(),
    }
    write_tensors(path, tensors, metadata)


def read_version(path: Path, run: RunSpec, group: str) -> StoredVersion:
    """What :func:`write_version` stored.

    Raises :class:`CheckpointInvalid` for a missing, cut, changed or foreign file, :class:`RunMismatch` for
    one of another run.
    """
    metadata, tensors = read_tensors(path)
    if metadata.get("run") != run.run_id:
        raise RunMismatch(run.run_id, metadata.get("run", "unknown"), str(path))
    if metadata.get("group") != group:
        raise CheckpointInvalid(str(path), f"it holds {metadata.get('group')}, not {group}")
    try:
        version, manifest = int(metadata["version"]), bytes.fromhex(metadata["manifest"])
        payload = vector_of(run, group, tensors)
        if payload_elements(run.training, len(payload)) > len(payload):
            names = [name for name in tensors if name.startswith(MOMENTUM)]
            momentum = {name.removeprefix(MOMENTUM): tensors[name] for name in names}
            payload = np.concatenate([payload, vector_of(run, group, momentum)])
        return StoredVersion(version, payload, manifest)
    except (KeyError, ValueError) as error:
        raise CheckpointInvalid(str(path), str(error)) from error


def export_model(
    directory: Path,
    run: RunSpec,
    vectors: Mapping[str, Vector],
    versions: Mapping[str, int],
    evaluation: Mapping[str, Any] | None = None,
    trained: str = BY_A_SWARM,
) -> None:
    """Write the assembled model: ``model.safetensors``, ``config.json`` and a model card.

    ``spheroid_node.model.load`` reads it; ``trained`` tells the reader of the card how it was made. A group
    that is not in ``vectors`` raises :class:`KeyError`, except a frozen interface, which follows from the
    run. Raises :class:`OutputUnwritable`.
    """
    interface = vectors.get(INTERFACE_GROUP)
    if interface is None and run.interface == "frozen":
        interface = initial_vector(run, INTERFACE_GROUP)
    parts = {"interface": (INTERFACE_GROUP, vectors[INTERFACE_GROUP] if interface is None else interface)}
    for block in range(run.model.blocks):
        parts[f"blocks.{block}"] = (block_group(block), vectors[block_group(block)])
    tensors = {
        f"{prefix}.{name}": tensor
        for prefix, (group, vector) in parts.items()
        for name, tensor in named_tensors(run, group, vector).items()
    }
    config = {"run": run.model_dump(mode="json"), "run_id": run.run_id, "versions": dict(versions)}
    if evaluation is not None:
        config["evaluation"] = dict(evaluation)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / MODEL_FILE, to_safetensors(tensors, {"format": "pt"}))
        write_atomically(directory / CARD_FILE, model_card(run, versions, evaluation, trained).encode())
        write_atomically(directory / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")
    except OSError as error:
        raise OutputUnwritable(str(directory), error.strerror or str(error)) from error


def import_model(directory: Path) -> tuple[RunSpec, dict[str, int]]:
    """Run and versions of an exported model. Raises :class:`ModelInvalid`."""
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return RunSpec.model_validate(config["run"]), {str(k): int(v) for k, v in config["versions"].items()}
    except OSError as error:
        raise ModelInvalid(str(directory), f"{CONFIG_FILE}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelInvalid(str(directory), f"{CONFIG_FILE}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Store tensors with a checksum over them and ``metadata``. Raises :class:`OSError`."""
    checksum = _checksum(tensors, metadata)
    write_atomically(path, to_safetensors(dict(tensors), {**metadata, CHECKSUM: checksum, "format": "pt"}))


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors that :func:`write_tensors` stored. Raises :class:`CheckpointInvalid`."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            names = file.keys()
            tensors = {name: np.array(file.get_tensor(name)) for name in names}
    except OSError as error:
        raise CheckpointInvalid(str(path), error.strerror or str(error)) from error
    except (SafetensorError, AttributeError, TypeError) as error:  # the latter of a dtype unknown to numpy
        raise CheckpointInvalid(str(path), f"it is damaged ({error})") from error
    checksum, _ = metadata.pop(CHECKSUM, ""), metadata.pop("format", "")
    if checksum != _checksum(tensors, metadata):
        raise CheckpointInvalid(str(path), "its contents do not match its checksum")
    return metadata, tensors


def _checksum(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    total = hashlib.blake2b(json.dumps(sorted(metadata.items())).encode(), digest_size=32)
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        total.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        total.update(tensor.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` in one step. Raises :class:`OSError`, and then ``path`` is as before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot sync a folder; the rename itself has happened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
