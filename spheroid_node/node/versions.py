"""The versions that a node holds: the last few of every group, in memory and, for its own groups, on disk.

Of some more it has the manifests alone (node/history.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from spheroid_node.errors import CheckpointInvalid, RunMismatch
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import join
from spheroid_node.node.disk import Disk
from spheroid_node.node.history import History, Signed
from spheroid_node.rounds import shards
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.forks import choose
from spheroid_node.rounds.outer import first_payload, payload_elements
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import read_version, write_version
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import Listing, Manifest
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    Vector,
    chunk_hash,
    chunks,
    digest_of_hashes,
    vector_bytes,
)

log = structlog.get_logger()

MANIFESTS = "manifests"
"""File of a group's history, beside its versions."""


@dataclass(frozen=True)
class Held:
    """A version in memory. ``sealed`` is empty and ``manifest`` None at version 0."""

    group: str
    version: int
    payload: Vector
    """All that travels (rounds/outer.py): the parameters, and what the next outer step needs beside them."""
    elements: int
    """Of the parameters."""
    hashes: tuple[bytes, ...]
    digest: bytes
    """Of the payload."""
    sealed: bytes
    manifest: Manifest | None
    signer: str = ""
    """The aggregator that made it."""

    @classmethod
    def of(cls, group: str, version: int, payload: Vector, sealed: bytes = b"") -> Held:
        """Raises :class:`ValueError` if ``sealed`` is not the manifest of this version, :class:`WireError` if
        it is none at all.
        """
        hashes = tuple(chunk_hash(chunk) for chunk in chunks(vector_bytes(payload)))
        signer, manifest = Manifest.unseal(sealed) if sealed else ("", None)
        elements = manifest.elements if manifest else len(payload)
        digest = digest_of_hashes(hashes)
        held = cls(group, version, payload, elements, hashes, digest, sealed, manifest, signer)
        if (manifest is None) != (version == 0) or (
            manifest and (manifest.group, manifest.version, manifest.digest) != (group, version, held.digest)
        ):
            raise ValueError(f"version {version} of {group} does not match its manifest")
        return held

    @classmethod
    def initial(cls, run: RunSpec, group: str) -> Held:
        """Version 0, which everyone makes from the run's seed."""
        vector = initial_vector(run, group)
        held = cls.of(group, 0, first_payload(run.training, vector))
        return replace(held, elements=len(vector))

    @property
    def vector(self) -> Vector:
        """The parameters: float32 [elements]."""
        return self.payload[: self.elements]

    @property
    def steps(self) -> int:
        """Local steps behind this version, for the learning rate."""
        return self.manifest.steps if self.manifest else 0

    @property
    def round(self) -> int:
        """The round that made this version; −1 for version 0."""
        return self.manifest.round if self.manifest else -1

    @property
    def base(self) -> Base:
        """As what a round is made of."""
        return Base.of(self.manifest) if self.manifest else Base(0, self.digest)


@dataclass(frozen=True)
class Whole:
    """A block or the interface at one of its versions, of which a node holds all shards.

    ``number`` names it: the version of its only group or, where there are shards, the N of rounds/shards.py.
    """

    name: str
    number: int
    shards: tuple[Held, ...]

    @property
    def vector(self) -> Vector:
        """The parameters: float32."""
        return join([held.vector for held in self.shards])

    @property
    def digest(self) -> bytes:
        """Of the version or, where there are shards, of their digests."""
        digests = [held.digest for held in self.shards]
        return digests[0] if len(digests) == 1 else digest_of_hashes(digests)


class VersionStore:
    """The last :attr:`RunSpec.kept_versions` of every group; what other nodes fetch from this one."""

    def __init__(
        self,
        run: RunSpec,
        folder: Callable[[str], Path | None] = lambda group: None,
        disk: Disk | None = None,
    ) -> None:
        """``folder`` gives the directory of a group's files, or None to keep it in memory alone."""
        self.disk = disk or Disk()
        self.unwritten: set[str] = set()
        """Groups whose newest version the disk did not take."""
        self._run = run
        self._folder = folder
        self._held: dict[str, dict[int, Held]] = {}
        self._past: dict[str, History] = {}
        self._adopting = threading.Lock()

    def newest(self, group: str) -> Held:
        """The newest version here; the first call reads the disk or makes version 0 from the seed."""
        if group not in self._held:
            folder = self._folder(group)
            file = folder / MANIFESTS if folder else None
            self._past[group] = History(self._run.run_id, group, file)
            self._held[group] = {held.version: held for held in self._from_disk(group)}
            self._past[group].follow(_signed(self._held[group].values()))
        if not self._held[group]:
            self._held[group][0] = Held.initial(self._run, group)
        versions = self._held[group]
        return versions[max(versions)]

    def get(self, group: str, version: int) -> Held | None:
        newest = self.newest(group)
        return newest if version == -1 else self._held[group].get(version)

    def behind(self, group: str, lag: int) -> Held:
        """The version ``lag`` before the newest, or the nearest to it that is here."""
        wanted = self.newest(group).version - lag
        versions = self._held[group]
        return versions[min(versions, key=lambda number: (abs(number - wanted), -number))]

    def line(self, group: str) -> dict[int, Manifest]:
        """By version, the manifests of those that are here, and of those before them that are known."""
        self.newest(group)
        here = {item.manifest.version: item.manifest for item in _signed(self._held[group].values())}
        return self._past[group].manifests | here

    def whole(self, name: str, number: int) -> Whole | None:
        """A block or the interface at exactly this version; None if that is not here."""
        groups = self._run.shards_of(name)
        if len(groups) == 1:
            held = self.get(name, number)
            return None if held is None else Whole(name, number, (held,))
        versions = shards.at(self.histories(name), number)
        if versions is None:
            return None
        found = tuple(self._held[group][version] for group, version in zip(groups, versions, strict=True))
        return Whole(name, number, found)

    def whole_behind(self, name: str, lag: int) -> Whole | None:
        """As :meth:`behind`, of a block or the interface; None if no shards that are here belong together."""
        if len(self._run.shards_of(name)) == 1:
            held = self.behind(name, lag)
            return Whole(name, held.version, (held,))
        here = shards.numbers(self.histories(name))
        return self.whole(name, here[min(lag, len(here) - 1)]) if here else None

    def histories(self, name: str) -> list[list[shards.Dated]]:
        """By shard of a block or the interface: the versions that are here, ascending."""
        newest = [self.newest(group) for group in self._run.shards_of(name)]
        return [
            [shards.Dated(held.version, held.round) for _, held in sorted(self._held[item.group].items())]
            for item in newest
        ]

    def groups(self) -> tuple[str, ...]:
        return tuple(self._held)

    def add(self, held: Held) -> None:
        """Keep a version older than the newest beside it, in memory."""
        with self._adopting:
            newest = self.newest(held.group)
            if newest.version - self._run.kept_versions < held.version < newest.version:
                self._held[held.group] = dict(sorted({held.version: held, **self._held[held.group]}.items()))

    def adopt(self, held: Held) -> Held:
        """Keep ``held`` as the newest of its group: on disk first, then in memory, then forget the oldest.

        Returns what is newest afterwards: something else where a better version came first. A full disk is
        reported and costs nothing else: the version is served and trained from memory, and written when there
        is room (:meth:`write_again`). For any thread.
        """
        with self._adopting:
            newest = self.newest(held.group)
            if held.manifest is None or not is_better(held.signer, held.manifest, newest):
                return newest
            written = self._write(held)
            # A fork that lost is not an older version: whatever is not below the new one goes.
            below = [old for old in self._held[held.group].values() if old.version < held.version]
            kept = linked([*below, held])[-self._run.kept_versions :]
            self._held[held.group] = {version.version: version for version in kept}
            self._past[held.group].follow(_signed(kept))
            if written:
                self._write_history(held.group)
                self._forget(held.group)
            return held

    def _write(self, held: Held) -> bool:
        folder = self._folder(held.group)
        if folder is None:
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = _file(folder, held.version)
            write_version(path, self._run, held.group, held.version, held.payload, held.sealed)
        except OSError as error:
            self.unwritten.add(held.group)
            self.disk.failed("versions", error)
            return False
        self.unwritten.discard(held.group)
        if not self.unwritten:
            self.disk.wrote("versions")
        return True

    def _write_history(self, group: str) -> None:
        try:
            self._past[group].save()
        except OSError as error:
            self.disk.failed("manifests", error)
        else:
            self.disk.wrote("manifests")

    def write_again(self) -> None:
        """Try once more what the disk did not take. For any thread."""
        with self._adopting:
            for group in list(self.unwritten):
                if self._write(self.newest(group)):
                    self._forget(group)

    def _forget(self, group: str) -> None:
        """Remove the files of versions that are not held any more."""
        folder = self._folder(group)
        names = {_file(folder, version).name for version in self._held[group]} if folder else set()
        with suppress(OSError):
            for path in folder.glob("*.safetensors") if folder else ():
                if path.name not in names:
                    path.unlink(missing_ok=True)

    def listing(self, group: str, version: int) -> Listing | None:
        """What a transfer offers of a version; −1 is the newest here. Without hashes: its manifest alone."""
        held = self.get(group, version) if group in self._held else None
        if held is None:
            known = self._past[group].get(version) if group in self._past else None
            if known is None:
                return None
            size = 4 * payload_elements(self._run.training, known.manifest.elements)
            return Listing(group=group, version=version, size=size, hashes=b"", manifest=known.sealed)
        return Listing(
            group=group,
            version=held.version,
            size=held.payload.nbytes,
            hashes=b"".join(held.hashes),
            manifest=held.sealed,
        )

    def chunk(self, group: str, version: int, index: int) -> bytes | None:
        """Chunk ``index`` of a version's float32 payload."""
        held = self.get(group, version) if group in self._held else None
        if held is None or index >= len(held.hashes):
            return None
        return bytes(vector_bytes(held.payload)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])

    def _from_disk(self, group: str) -> list[Held]:
        folder = self._folder(group)
        held = []
        for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
            try:
                stored = read_version(path, self._run, group)
                held.append(Held.of(group, stored.version, stored.payload, stored.manifest))
            except (CheckpointInvalid, RunMismatch, WireError, ValueError) as error:
                log.warning("version.unreadable", path=str(path), cause=str(error))
        return linked(held)[-self._run.kept_versions :]


def _signed(versions: Iterable[Held]) -> list[Signed]:
    return [Signed(held.manifest, held.sealed) for held in versions if held.manifest]


def _file(folder: Path, version: int) -> Path:
    return folder / f"{version:08d}.safetensors"


def linked(versions: Iterable[Held]) -> list[Held]:
    """Ascending, without those that the version after them was not made from: forks that lost."""
    kept: list[Held] = []
    for held in sorted(versions, key=lambda held: held.version, reverse=True):
        after = kept[-1] if kept else None
        follows = after is not None and after.manifest is not None and after.version == held.version + 1
        if after is None or not follows or after.manifest.parent == held.digest:  # type: ignore[union-attr]
            kept.append(held)
    return kept[::-1]


def is_better(signer: str, manifest: Manifest, held: Held) -> bool:
    """Whether everyone will follow ``manifest`` rather than the version held."""
    if held.manifest is None:
        return True
    if manifest.digest == held.digest and manifest.version == held.version:
        return False
    chosen = choose(((held.signer, held.manifest), (signer, manifest)))
    return chosen is not None and chosen[1] is manifest
