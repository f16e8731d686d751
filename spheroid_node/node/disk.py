"""A disk that does not take what is written: said once, and once more when it does again."""

from __future__ import annotations

import errno
import os

import structlog

log = structlog.get_logger()


class Disk:
    """What could not be written last time, by what it is. For any thread."""

    def __init__(self) -> None:
        self._failed: dict[str, str] = {}

    @property
    def note(self) -> str:
        """For the owner; empty while all can be written."""
        failed = dict(self._failed)
        return f"{', '.join(failed)} not on disk: {next(iter(failed.values()))}" if failed else ""

    def failed(self, what: str, error: OSError) -> None:
        cause = os.strerror(error.errno).lower() if error.errno else str(error)
        if what not in self._failed:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some room" if full else "look at the disk of the state directory"
            log.error(
                "disk.not_written",
                what=what,
                cause=cause,
                remedy=f"{remedy}; the node goes on from memory, and writes again when it can",
            )
        self._failed[what] = cause

    def wrote(self, what: str) -> None:
        if self._failed.pop(what, None) is not None:
            log.info("disk.written_again", what=what)
