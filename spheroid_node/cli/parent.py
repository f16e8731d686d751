"""Processes of the demo end with it, however it ends.

The demo names itself in the environment of what it starts; each of these asks the kernel to be killed when
the demo is. So not even SIGKILL of the demo leaves a process behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "SPHEROID_PARENT"
"""Environment variable: process id of the parent that this process must not outlive."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


def die_with_parent() -> None:
    """If the environment names a parent, tie this process to it. The variable is not handed on."""
    named = os.environ.pop(PARENT, "")
    if not named.isdigit():
        return
    parent = int(named)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
