"""The manifests of a group's last versions: they say what became of an update when its version is long gone.

A worker that was killed, or slept, asks for them when it comes back (rounds/contribution.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import structlog

from spheroid_node.training.checkpoint import write_atomically
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.messages import Manifest

log = structlog.get_logger()

LENGTH = 16
"""Versions, one a round at most: more than the KEEP_ROUNDS after which node/outbox.py forgets an update."""


class Signed(NamedTuple):
    manifest: Manifest
    sealed: bytes


class History:
    """Of one group; ``file`` None keeps it in memory alone."""

    def __init__(self, run_id: str, group: str, file: Path | None) -> None:
        self._run_id, self._group, self._file = run_id, group, file
        self._signed: dict[int, Signed] = {}
        if file is not None and file.exists():
            self.follow(self._read(file))

    @property
    def manifests(self) -> dict[int, Manifest]:
        """By version."""
        return {version: signed.manifest for version, signed in self._signed.items()}

    def get(self, version: int) -> Signed | None:
        return self._signed.get(version)

    def follow(self, line: Iterable[Signed]) -> None:
        """Take the versions that are followed now, ascending; what they were not made from lost, and goes."""
        signed = dict(self._signed)
        for item in line:
            version = item.manifest.version
            before = signed.get(version - 1)
            if before is not None and before.manifest.digest != item.manifest.parent:
                del signed[version - 1]
            signed = {other: kept for other, kept in signed.items() if version - LENGTH < other < version}
            signed[version] = item
        self._signed = signed

    def save(self) -> None:
        """Raises :class:`OSError`."""
        if self._file is not None:
            write_atomically(self._file, pack([signed.sealed for signed in self._signed.values()]))

    def _read(self, file: Path) -> list[Signed]:
        """Nothing where something else has written there: it is of use, and no more."""
        try:
            signed = [Signed(Manifest.unseal(sealed)[1], sealed) for sealed in unpack(file.read_bytes())]
        except (OSError, WireError, TypeError) as error:
            log.warning("history.unreadable", path=str(file), cause=str(error))
            return []
        own = self._run_id, self._group
        return sorted(
            (item for item in signed if (item.manifest.run, item.manifest.group) == own),
            key=lambda item: item.manifest.version,
        )
