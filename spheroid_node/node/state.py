"""The state directory: everything a node must remember, held by one live node at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from spheroid_node.errors import RunMismatch, StateInUse, StateUnwritable
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import write_atomically

OTHER_FILES = ("join.txt", "port")
"""What a bootstrap keeps beside the rest."""


class StateDirectory:
    """Paths of a node's files, behind a lock that ends with the process that holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def contacts(self) -> Path:
        """Peers that it has met."""
        return self.path / "peers.json"

    @property
    def _run_file(self) -> Path:
        return self.path / "run.msgpack"

    @property
    def spool(self) -> Path:
        """Updates on their way into a version; emptied at every start."""
        return self.path / "spool"

    def versions(self, group: str) -> Path:
        return self.path / "versions" / group

    @property
    def outbox(self) -> Path:
        """What was learnt and is in no version yet."""
        return self.path / "outbox"

    def partial(self, group: str) -> Path:
        """What has arrived of a version that is being fetched."""
        return self.path / "partial" / group

    def optimiser(self, block: int) -> Path:
        return self.path / f"optimiser-{block}.safetensors"

    def __enter__(self) -> Self:
        """Take the directory. Raises :class:`StateUnwritable`, :class:`StateInUse`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StateUnwritable(str(self.path), error.strerror or str(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._lock, 64).decode(errors="replace").strip() or "another process"
            self._release()
            raise StateInUse(str(self.path), holder) from error
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"process {os.getpid()}\n".encode(), 0)
            self.spool.mkdir(exist_ok=True)
            # What a node that was killed had not finished: updates, and files before they got their names.
            for left in (*self.spool.iterdir(), *self.path.glob("**/.*.safetensors.*"), *self._unfinished()):
                left.unlink()
        except OSError as error:
            self._release()
            raise StateUnwritable(str(self.path), error.strerror or str(error)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def check(self, run: RunSpec) -> None:
        """Raise :class:`RunMismatch` if the directory belongs to another run."""
        try:
            kept = RunSpec.unpack(self._run_file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            cause = f"{self._run_file} is damaged ({error}); without it the node goes on"
            raise StateUnwritable(str(self.path), cause) from error
        if kept.run_id != run.run_id:
            raise RunMismatch(run.run_id, kept.run_id, f"State directory {self.path}")

    def bind(self, run: RunSpec) -> None:
        """From now on the directory belongs to ``run``. Raises as :meth:`check`."""
        self.check(run)
        try:
            write_atomically(self._run_file, run.pack())
        except OSError as error:
            raise StateUnwritable(str(self.path), error.strerror or str(error)) from error

    def forget_partials(self, groups: Container[str]) -> None:
        """Remove what has arrived of versions of other groups: a node that has moved does not need it."""
        with suppress(OSError):
            for file in self.partial("").iterdir():
                if file.name not in groups:
                    file.unlink()

    def _unfinished(self) -> Iterator[Path]:
        """Files of this directory itself that were being written."""
        for name in (self._run_file.name, self.contacts.name, self.identity.name, *OTHER_FILES):
            yield from self.path.glob(f".{name}.*")

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
