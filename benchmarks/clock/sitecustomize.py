"""A wrong clock for one process and what it starts: ``CLOCK_OFFSET`` seconds are added to ``time.time``.

Python imports a module of this name by itself when its folder is in PYTHONPATH, before anything has taken
``time.time`` for a clock of its own, as hivemind does. The log keeps the right time: it asks ``datetime``.
"""

import os
import time

_offset, _right = float(os.environ.get("CLOCK_OFFSET", "0")), time.time


def _wrong() -> float:
    return _right() + _offset


if _offset:
    time.time = _wrong
