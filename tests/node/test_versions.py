from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spheroid_node.model.initial import initial_vector
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.node.history import LENGTH, History
from spheroid_node.node.versions import Held, VersionStore
from spheroid_node.rounds.collection import Base
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import write_version
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, UpdateOutcome
from spheroid_node.wire.tensors import Vector, chunk_hash, digest_of_hashes, vector_digest

GROUP = "block-1"
KEY = ephemeral_identity().key


def made(run: RunSpec, version: int, vector: Vector, *, signed_for: Vector | None = None) -> Held:
    """On top of version 0 with ``version`` − 1 added to all of it, as most tests have them."""
    before = vector_digest(initial_vector(run, GROUP) + (version - 1))
    outcome = UpdateOutcome(peer="12D3", digest=bytes(32), tokens=8, norm=1.5, verdict=Verdict.ACCEPTED)
    manifest = Manifest(
        run=run.run_id, group=GROUP, round=version + 5, version=version, parent=before,
        digest=vector_digest(vector if signed_for is None else signed_for), elements=len(vector), rank=0,
        steps=10 * version, total=version, updates=[outcome],
    )  # fmt: skip
    return Held.of(GROUP, version, vector, manifest.seal(KEY))


def files(folder: Path) -> list[Path]:
    """Of versions, ascending."""
    return sorted((folder / GROUP).glob("*.safetensors"))


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_version_0_follows_from_the_seed(run: RunSpec) -> None:
    held = VersionStore(run).newest(GROUP)
    assert (held.version, held.round, held.base) == (0, -1, Base(0, held.digest))
    assert np.array_equal(held.vector, initial_vector(run, GROUP))


def test_as_many_versions_are_kept_as_a_chain_may_lag(run: RunSpec, tmp_path: Path) -> None:
    assert run.kept_versions == 3  # of two blocks the first lags by one, and one more may be under way
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    for version in (1, 2, 3, 4):
        store.adopt(made(run, version, vector + version))
    assert store.get(GROUP, 1) is None
    assert [store.get(GROUP, version).version for version in (2, 3, 4, -1)] == [2, 3, 4, 4]  # type: ignore[union-attr]
    assert len(files(tmp_path)) == 3

    again = VersionStore(run, lambda group: tmp_path / group)
    newest = again.newest(GROUP)
    assert newest.base == Base(4, newest.digest, 40, (1.5,), 4)
    assert newest.digest == vector_digest(vector + 4)
    assert again.get(GROUP, 2) is not None


def test_a_version_behind_the_newest_or_the_nearest_to_it(run: RunSpec) -> None:
    store = VersionStore(run)
    vector = store.newest(GROUP).vector
    assert store.behind(GROUP, 1).version == 0
    for version in (1, 4, 5):
        store.adopt(made(run, version, vector + version))
    assert [store.behind(GROUP, lag).version for lag in (0, 1, 2, 3, 9)] == [5, 4, 4, 1, 1]


def test_an_older_version_is_put_where_it_belongs(run: RunSpec) -> None:
    store = VersionStore(run)
    vector = store.newest(GROUP).vector
    store.adopt(made(run, 5, vector + 5))
    store.add(made(run, 4, vector + 4))
    assert (store.newest(GROUP).version, store.behind(GROUP, 1).version) == (5, 4)
    store.add(made(run, 2, vector + 2))  # too far back
    store.add(made(run, 6, vector + 6))  # for adopt to judge
    assert (store.newest(GROUP).version, store.get(GROUP, 2)) == (5, None)


def test_a_version_of_a_fork_that_lost_makes_way(run: RunSpec, tmp_path: Path) -> None:
    vector = VersionStore(run).newest(GROUP).vector
    forks = [made(run, 1, vector + 1), made(run, 1, vector + 9)]
    better = min(forks, key=lambda held: held.digest)
    for order in (forks, forks[::-1]):
        store = VersionStore(run, lambda group: tmp_path / group)
        for held in order:
            store.adopt(held)
        assert store.newest(GROUP).digest == better.digest
        assert VersionStore(run, lambda group: tmp_path / group).newest(GROUP).digest == better.digest


def test_a_version_that_the_next_was_not_made_from_makes_way(run: RunSpec, tmp_path: Path) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    store.adopt(made(run, 1, vector + 1))
    store.adopt(made(run, 2, vector + 2.5))  # a fork: version 3 is made from another
    held = [store.adopt(made(run, 3, vector + 3))]
    assert held[0].version == 3
    assert store.line(GROUP).keys() == {1, 3}
    assert store.get(GROUP, 2) is None
    assert len(files(tmp_path)) == 2
    assert VersionStore(run, lambda group: tmp_path / group).line(GROUP).keys() == {1, 3}


def test_manifests_outlive_their_versions(run: RunSpec, tmp_path: Path) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    made_all = [made(run, version, vector + version) for version in range(1, LENGTH + 4)]
    for held in made_all:
        store.adopt(held)
    expected = {held.version: held.manifest for held in made_all[-LENGTH:]}
    again = VersionStore(run, lambda group: tmp_path / group)
    assert store.line(GROUP) == again.line(GROUP) == expected
    for version in (4, LENGTH):
        listing = again.listing(GROUP, version)
        assert listing is not None and (listing.version, listing.hashes) == (version, b"")
        assert (listing.size, listing.manifest) == (vector.nbytes, made_all[version - 1].sealed)
        assert again.chunk(GROUP, version, 0) is None
    assert again.listing(GROUP, 3) is None


def test_manifests_survive_versions_that_were_missed(run: RunSpec) -> None:
    store = VersionStore(run)
    vector = store.newest(GROUP).vector
    for version in (1, 2, 9, 10, 11, 2 + LENGTH):
        store.adopt(made(run, version, vector + version))
    assert store.line(GROUP).keys() == {9, 10, 11, 2 + LENGTH}


@pytest.mark.parametrize("spoilt", [b"", b"\xc1", b"\x07", b"\x91\x07", b"\x91\xc4\x01\x00", b"\x81\x01\x02"])
def test_spoilt_manifests_cost_themselves_alone(run: RunSpec, tmp_path: Path, spoilt: bytes) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    for version in (1, 2, 3, 4):
        store.adopt(made(run, version, vector + version))
    (tmp_path / GROUP / "manifests").write_bytes(spoilt)
    again = VersionStore(run, lambda group: tmp_path / group)
    assert again.newest(GROUP).version == 4
    assert again.line(GROUP).keys() == {2, 3, 4}


def test_manifests_of_another_group_are_not_taken_up(run: RunSpec, tmp_path: Path) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    for version in (1, 2, 3, 4):
        store.adopt(made(run, version, vector + version))
    file = History(run.run_id, GROUP, tmp_path / GROUP / "manifests")
    assert file.manifests.keys() == {1, 2, 3, 4}
    assert not History(run.run_id, "block-0", tmp_path / GROUP / "manifests").manifests
    assert not History("f" * 16, GROUP, tmp_path / GROUP / "manifests").manifests


def test_a_disk_that_does_not_take_manifests_is_told(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    with monkeypatch.context() as patch:
        patch.setattr("spheroid_node.node.history.write_atomically", full)
        store.adopt(made(run, 1, vector + 1))
    assert store.disk.note.startswith("manifests not on disk")
    store.adopt(made(run, 2, vector + 2))
    assert not store.disk.note


def test_what_is_not_linked_on_disk_is_not_taken_up(run: RunSpec, tmp_path: Path) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    (tmp_path / GROUP).mkdir()
    for held in (made(run, 1, vector + 1.5), made(run, 2, vector + 2)):
        write_version(
            tmp_path / f"{GROUP}/{held.version:08d}.safetensors",
            run,
            GROUP,
            held.version,
            held.vector,
            held.sealed,
        )
    again = VersionStore(run, lambda group: tmp_path / group)
    assert again.line(GROUP).keys() == {2}


def test_a_damaged_file_is_passed_over(run: RunSpec, tmp_path: Path) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    for version in (1, 2):
        store.adopt(made(run, version, vector + version))
    newest = files(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    assert VersionStore(run, lambda group: tmp_path / group).newest(GROUP).version == 1


def test_a_full_disk_costs_only_the_files_that_did_not_fit(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    store.adopt(made(run, 1, vector + 1))
    with monkeypatch.context() as patch:
        patch.setattr("spheroid_node.node.versions.write_version", full)
        for version in (2, 3, 4):
            store.adopt(made(run, version, vector + version))
    assert store.newest(GROUP).version == 4, "it is served and trained from memory"
    assert VersionStore(run, lambda group: tmp_path / group).newest(GROUP).version == 1, (
        "the last that fitted"
    )
    store.adopt(made(run, 5, vector + 5))
    assert VersionStore(run, lambda group: tmp_path / group).newest(GROUP).version == 5


def test_what_comes_late_does_not_replace_what_is_newer(run: RunSpec, tmp_path: Path) -> None:
    store = VersionStore(run, lambda group: tmp_path / group)
    vector = store.newest(GROUP).vector
    newer = made(run, 6, vector + 6)
    assert store.adopt(newer) is newer
    assert store.adopt(made(run, 5, vector + 5)) is newer
    assert store.newest(GROUP) is newer
    assert [path.name for path in files(tmp_path)] == ["00000006.safetensors"]


def test_a_manifest_must_fit_its_parameters(run: RunSpec) -> None:
    vector = initial_vector(run, GROUP)
    with pytest.raises(ValueError, match="does not match its manifest"):
        made(run, 1, vector, signed_for=vector + 1)
    with pytest.raises(ValueError, match="does not match its manifest"):
        Held.of(GROUP, 1, vector)


def test_listing_and_chunks_prove_each_other(run: RunSpec) -> None:
    store = VersionStore(run)
    assert store.listing(GROUP, 0) is None, "only groups that the node holds are offered"
    held = store.newest(GROUP)
    listing = store.listing(GROUP, -1)
    assert listing is not None
    assert (listing.version, listing.size, listing.manifest) == (0, held.vector.nbytes, b"")
    hashes = [listing.hashes[start : start + 32] for start in range(0, len(listing.hashes), 32)]
    assert digest_of_hashes(hashes) == held.digest
    parts = [store.chunk(GROUP, 0, index) for index in range(len(hashes))]
    assert [chunk_hash(part) for part in parts if part is not None] == hashes
    assert b"".join(part for part in parts if part is not None) == held.vector.astype("<f4").tobytes()
    assert store.chunk(GROUP, 0, len(hashes)) is None
    assert store.chunk(GROUP, 7, 0) is None
