"""The demo's children end when they are told to, and with all that they started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spheroid_node.cli.demo import processes
from spheroid_node.cli.demo.processes import Child, Children

STUB = """
import os, signal, subprocess, sys, time
sys.stdout.write("first line\\n")
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "settings":
    home = os.environ["XDG_CONFIG_HOME"]
    print(sorted(name for name in os.environ if name.startswith("SPHEROID_")),
          os.path.exists(os.path.join(home, "spheroid-node", "config.toml")))
    sys.exit()
if sys.argv[1] == "fails":
    sys.exit("error: it went wrong")
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[1] == "abandons":
    print(helper.pid, flush=True)
    os._exit(0)
if sys.argv[1] == "polite":
    def leave(*_):
        helper.kill()
        helper.wait()
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
print(helper.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    stub = tmp_path / "spheroid_node"
    stub.mkdir()
    (stub / "__main__.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Children(tmp_path)


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline


def helper_of(child: Child) -> int:
    wait_for(lambda: child.last_line.isdigit())
    return int(child.last_line)


def is_gone(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not state.strip() or state.startswith("Z")


async def test_who_leaves_when_asked_is_waited_for(children: Children) -> None:
    child = children.start("polite", ["polite"])
    helper = helper_of(child)
    await children.stop(20)
    assert child.process.returncode == 0
    wait_for(lambda: is_gone(helper))


async def test_who_does_not_leave_is_killed_with_its_helpers(children: Children) -> None:
    child = children.start("stubborn", ["stubborn"])
    helper = helper_of(child)
    await children.stop(0.2)
    assert child.process.returncode == -signal.SIGKILL
    wait_for(lambda: is_gone(helper))


def test_a_child_gets_none_of_the_settings_of_a_node(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPHEROID_PORT", "31337")
    monkeypatch.setenv("SPHEROID_RUNTIME_DIR", "/somewhere")
    with children:
        child = children.start("settings", ["settings"])
        wait_for(lambda: children.ended() == [child])
        seen = child.last_line
    assert seen == "['SPHEROID_PARENT', 'SPHEROID_RUNTIME_DIR'] False"


async def test_the_first_leaves_last(children: Children) -> None:
    first, second = children.start("first", ["polite"]), children.start("second", ["stubborn"])
    helper_of(first), helper_of(second)
    children.ask_to_leave()
    children.ask_to_leave()
    assert first.process.poll() is None
    second.process.kill()
    await children.stop(20)
    assert (first.process.returncode, second.process.returncode) == (0, -signal.SIGKILL)


def test_the_end_of_the_block_kills_what_is_left_over(children: Children) -> None:
    with pytest.raises(ZeroDivisionError), children:
        one, two = children.start("one", ["stubborn"]), children.start("two", ["abandons"])
        helpers = [helper_of(one), helper_of(two)]
        wait_for(lambda: children.ended() == [two])
        raise ZeroDivisionError
    for helper in helpers:
        wait_for(lambda helper=helper: is_gone(helper))  # type: ignore[misc]


def test_a_child_leads_a_session_of_its_own_and_knows_its_parent(children: Children) -> None:
    with children:
        child = children.start("polite", ["polite"])
        helper_of(child)
        assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0)
        if sys.platform == "linux":
            environment = Path(f"/proc/{child.process.pid}/environ").read_bytes().split(b"\0")
            assert f"{processes.PARENT}={os.getpid()}".encode() in environment


def test_the_last_line_of_one_that_failed_is_its_error(children: Children) -> None:
    with children:
        child = children.start("fails", ["fails"])
        wait_for(lambda: children.ended() == [child])
        assert child.last_line == "error: it went wrong"
