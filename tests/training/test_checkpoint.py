from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import spheroid_node.model
from spheroid_node.errors import CheckpointInvalid, ModelInvalid, OutputUnwritable, RunMismatch
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten, group_module
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.training.checkpoint import (
    export_model,
    import_model,
    read_version,
    write_atomically,
    write_version,
)
from spheroid_node.wire.tensors import Vector

MakeRun = Callable[..., RunSpec]


def random_vectors(run: RunSpec) -> dict[str, Vector]:
    groups = [*(block_group(block) for block in range(run.model.blocks)), INTERFACE_GROUP]
    return {group: initial_vector(run, group) + np.float32(number) for number, group in enumerate(groups)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("group", ["block-1", INTERFACE_GROUP])
def test_a_version_comes_back_as_it_was(run: RunSpec, tmp_path: Path, group: str) -> None:
    path, vector = tmp_path / "v.safetensors", random_vectors(run)[group]
    write_version(path, run, group, 12, vector, b"\x00signed")
    stored = read_version(path, run, group)
    assert (stored.version, stored.manifest) == (12, b"\x00signed")
    np.testing.assert_array_equal(stored.payload, vector)
    assert stored.payload.flags.writeable
    assert names(tmp_path) == ["v.safetensors"]


def test_a_version_comes_back_with_its_momentum(make_run: MakeRun, tmp_path: Path) -> None:
    path, run = tmp_path / "v.safetensors", make_run(training={"outer": "nesterov"})
    vector = random_vectors(run)["block-0"]
    payload = np.concatenate([vector, np.arange(len(vector), dtype=np.float32)])
    write_version(path, run, "block-0", 3, payload)
    np.testing.assert_array_equal(read_version(path, run, "block-0").payload, payload)
    write_version(path, run, "block-0", 3, vector)
    with pytest.raises(CheckpointInvalid, match="needs a tensor"):
        read_version(path, run, "block-0")


def test_a_type_that_numpy_does_not_know_is_damage(run: RunSpec, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    header = b'{"x":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointInvalid, match="damaged"):
        read_version(path, run, "block-0")


def test_every_damaged_byte_is_noticed(run: RunSpec, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    write_version(path, run, "block-0", 12, random_vectors(run)["block-0"], b"manifest")
    whole = path.read_bytes()
    version = whole.index(b'"version":"12"') + len(b'"version":"1')
    for place in (3, version, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointInvalid):
            read_version(path, run, "block-0")
    for length in (0, 7, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointInvalid):
            read_version(path, run, "block-0")
    path.unlink()
    with pytest.raises(CheckpointInvalid, match=r"v\.safetensors"):
        read_version(path, run, "block-0")


def test_a_version_of_another_run_or_group_is_refused(
    make_run: MakeRun, run: RunSpec, tmp_path: Path
) -> None:
    path, other = tmp_path / "v.safetensors", make_run(denoiser="edm")
    write_version(path, run, "block-0", 1, random_vectors(run)["block-0"])
    with pytest.raises(RunMismatch, match=f"{run.run_id}.*{other.run_id}"):
        read_version(path, other, "block-0")
    with pytest.raises(CheckpointInvalid, match="block-0, not block-1"):
        read_version(path, run, "block-1")


def test_a_full_disk_leaves_the_file_before(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, vector = tmp_path / "v.safetensors", random_vectors(run)["block-0"]
    write_version(path, run, "block-0", 1, vector)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_version(path, run, "block-0", 2, vector + 1)
    monkeypatch.undo()
    assert read_version(path, run, "block-0").version == 1
    assert names(tmp_path) == ["v.safetensors"]


def test_bytes_reach_the_disk_before_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append((tmp_path / "file").exists()), sync(fd))[1])
    write_atomically(tmp_path / "file", b"data")
    assert synced[0] is False
    assert (tmp_path / "file").read_bytes() == b"data"


def test_an_exported_model_is_loaded_as_it_was(run: RunSpec, tmp_path: Path) -> None:
    vectors = random_vectors(run)
    versions = {group: 10 + number for number, group in enumerate(vectors)}
    export_model(tmp_path / "model", run, vectors, versions, {"ce": [1.5, 1.25], "bytes": 64})
    model = spheroid_node.model.load(tmp_path / "model")
    for group, vector in vectors.items():
        np.testing.assert_array_equal(flatten(group_module(model, group)), vector)
    assert import_model(tmp_path / "model") == (run, versions)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["run_id"] == run.run_id
    assert config["evaluation"] == {"ce": [1.5, 1.25], "bytes": 64}
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| ce | 1.5000, 1.2500 |" in card
    assert run.run_id in card
    assert names(tmp_path / "model") == ["README.md", "config.json", "model.safetensors"]


def test_a_frozen_interface_need_not_be_given(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(interface="frozen")
    vectors = random_vectors(run)
    del vectors[INTERFACE_GROUP]
    export_model(tmp_path, run, vectors, {})
    model = spheroid_node.model.load(tmp_path)
    np.testing.assert_array_equal(flatten(model.interface), initial_vector(run, INTERFACE_GROUP))
    with torch.no_grad():
        logits, _ = model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, 32))
    assert logits[0].shape == (1, 4, 256)


def test_an_incomplete_model_is_not_exported(run: RunSpec, tmp_path: Path) -> None:
    vectors = random_vectors(run)
    del vectors[INTERFACE_GROUP]
    with pytest.raises(KeyError, match=INTERFACE_GROUP):
        export_model(tmp_path / "model", run, vectors, {})
    assert not (tmp_path / "model").exists()


def test_a_place_that_cannot_be_written_is_named(run: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputUnwritable, match="file"):
        export_model(tmp_path / "file", run, random_vectors(run), {})


@pytest.mark.parametrize("config", [None, "", "[]", "{}", '{"run": {}, "versions": {}}', '{"run": 1'])
def test_what_is_no_model_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelInvalid, match=r"config\.json"):
        import_model(tmp_path)
