"""What has arrived of a version: a fetch that breaks off goes on from it, also in another process."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog

from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    chunk_count,
    chunk_hash,
    digest_of_hashes,
    split_hashes,
)

log = structlog.get_logger()

SAVE_AFTER = 5.0
"""Seconds that a fetch may take before its chunks are worth a place on the disk."""
SAVED_AT_ONCE = 4
"""Chunks: the event loop waits for no more than these."""


class Partial:
    """The chunks of one version that proved themselves, in memory and, with a file, on disk.

    The file holds the hashes of all chunks and then the payload, with zeros for what has not come. Whatever a
    crash leaves in it, the digest proves the hashes and a hash its chunk.
    """

    def __init__(
        self, digest: bytes, size: int, file: Path | None = None, save_after: float = SAVE_AFTER
    ) -> None:
        """``digest``: of the version; empty where only its manifest will tell, and then nothing is saved."""
        self.digest = digest
        self.payload = np.empty(size, np.uint8).data  # its pages are made as it fills
        """Held once: the parameters of the version are these bytes."""
        self.missing = set(range(chunk_count(size)))
        self._size = size
        self._file = file if digest else None
        self._save_from = time.monotonic() + save_after
        self._hashes = b""
        self._unsaved: deque[int] = deque()
        self._handle: int | None = None

    @classmethod
    def resume(cls, digest: bytes, size: int, file: Path, save_after: float = SAVE_AFTER) -> Partial:
        """With what ``file`` holds of this version, if anything. Reads and hashes it: call it in a thread."""
        partial = cls(digest, size, file, save_after)
        with suppress(OSError), file.open("rb") as saved:
            hashes = saved.read(len(partial.missing) * DIGEST_BYTES)
            if digest_of_hashes(split_hashes(hashes)) != digest:
                return partial
            for index, expected in enumerate(split_hashes(hashes)):
                if chunk_hash(chunk := saved.read(partial._bytes_of(index))) == expected:
                    partial._put(index, chunk)
            partial._hashes = hashes
            log.info("transfer.resumed", chunks=len(split_hashes(hashes)) - len(partial.missing))
        return partial

    def begin(self, hashes: bytes) -> None:
        """The hashes of all chunks, which have proved themselves."""
        if self._hashes != hashes:
            with suppress(OSError):
                if self._file is not None:
                    self._file.unlink(missing_ok=True)
            self._hashes = hashes

    def add(self, index: int, chunk: bytes) -> None:
        """A chunk that matches its hash."""
        if index not in self.missing:
            return
        self._put(index, chunk)
        if self._file is None:
            return
        self._unsaved.append(index)
        if time.monotonic() >= self._save_from:
            try:
                self._save()
            except OSError as error:  # a disk that is full costs what would be fetched again after a crash
                log.debug("transfer.not_saved", cause=error.strerror)
                self._close()
                self._file = None

    def close(self) -> None:
        """Every chunk has arrived and is kept elsewhere: the file goes."""
        self._close()
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _save(self) -> None:
        assert self._file is not None
        if self._handle is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._handle, self._hashes, 0)
        for _ in range(min(SAVED_AT_ONCE, len(self._unsaved))):
            start = (index := self._unsaved.popleft()) * CHUNK_BYTES
            chunk = self.payload[start : start + self._bytes_of(index)]
            os.pwrite(self._handle, chunk, len(self._hashes) + start)

    def _put(self, index: int, chunk: bytes) -> None:
        start = index * CHUNK_BYTES
        self.payload[start : start + len(chunk)] = chunk
        self.missing.discard(index)

    def _bytes_of(self, index: int) -> int:
        return min(CHUNK_BYTES, self._size - index * CHUNK_BYTES)

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
