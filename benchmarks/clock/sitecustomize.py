"""A wrong clock for one process and what it starts: ``time.time`` is off by the seconds in a file.

The file is named by WRONG_CLOCK in the environment.
Python imports a module of this name by itself when its folder is in PYTHONPATH, before anything has taken
``time.time`` for a clock of its own, as hivemind does. The log keeps the right time: it asks ``datetime``.
"""

import os
import time
from pathlib import Path

_file, _right = Path(os.environ["WRONG_CLOCK"]), time.time


def _wrong() -> float:
    return _right() + float(_file.read_text())


time.time = _wrong
