"""A process that names its parent ends with it, also when that parent is killed."""

import os
import signal
import subprocess
import sys
import time

from spheroid_node.cli.parent import PARENT

CHILD = """
import os, time
from spheroid_node.cli.parent import PARENT, die_with_parent
die_with_parent()
assert PARENT not in os.environ
print("ready", os.getpid(), flush=True)
time.sleep(600)
"""
PARENT_CODE = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}], env=os.environ | {{"{PARENT}": str(os.getpid())}},
                 start_new_session=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie that only waits for its new parent."""
    try:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    except ProcessLookupError:
        return False
    return bool(state.strip()) and not state.startswith("Z")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"


def test_killing_the_parent_ends_the_child() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT_CODE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    word, pid = parent.stdout.readline().split()
    assert word == "ready" and is_running(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(int(pid))


def test_a_parent_that_is_already_gone_ends_the_child_at_once() -> None:
    environment = os.environ | {PARENT: "1"}  # never the parent of what a test starts
    process = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, timeout=60)
    assert process.returncode == 1 and process.stdout == b""


def test_without_a_named_parent_nothing_is_tied() -> None:
    code = "from spheroid_node.cli.parent import die_with_parent; die_with_parent(); print('lives')"
    environment = {name: value for name, value in os.environ.items() if name != PARENT}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60)
    assert process.stdout == b"lives\n"
