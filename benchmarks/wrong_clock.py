"""Processes whose clock is wrong, on a machine whose clock is right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

FOLDER = Path(__file__).parent / "clock"


def set_clock(file: Path, seconds: float) -> None:
    """From now on the clock of who has this ``file`` is off by that."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(str(seconds))
    temporary.replace(file)


@contextmanager
def wrong_clock(file: Path, seconds: float) -> Iterator[None]:
    """What is started here, and what that starts, has a clock that is off by the seconds in ``file``."""
    set_clock(file, seconds)
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"PYTHONPATH": path, "WRONG_CLOCK": str(file)}):
        yield
