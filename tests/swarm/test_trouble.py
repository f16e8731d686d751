"""A node's life in a real swarm: killed, restarted, copied, left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from .conftest import Node, Swarm, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def guest(swarm: Swarm) -> Iterator[Node]:
    """A third replica of block 0, which these tests may do anything to."""
    node = swarm.join(0, "guest")
    swarm.nodes.remove(node)
    node.wait_for("round.receipt", group="block-0", verdict="accepted")
    yield node
    os.killpg(node.pid, signal.SIGKILL) if node.child.process.poll() is None else None


def accepted_after(node: Node, event: str, count: int) -> bool:
    """Whether an update was accepted after the ``count``-th event of that name."""
    times = [found["timestamp"] for found in node.events(event)]
    receipts = node.events("round.receipt", verdict="accepted")
    return len(times) >= count and any(receipt["timestamp"] > times[count - 1] for receipt in receipts)


def test_a_killed_trainer_costs_a_round_and_no_more(guest: Node) -> None:
    starts = len(guest.events("trainer.started"))
    os.kill(guest.trainer_pid, signal.SIGKILL)
    wait_for("an update of a new trainer", lambda: accepted_after(guest, "trainer.started", starts + 1))
    assert guest.child.process.poll() is None
    assert any("died" in event["cause"] for event in guest.events("trainer.failed"))


def test_a_key_on_a_second_machine_is_noticed_and_the_file_named(swarm: Swarm, guest: Node) -> None:
    (swarm.folder / "copy").mkdir()
    shutil.copy(guest.state / "identity.key", swarm.folder / "copy" / "identity.key")
    copy = swarm.join(0, "copy")
    swarm.nodes.remove(copy)
    try:
        assert copy.child.process.wait(timeout=150) == 2
    finally:
        if copy.child.process.poll() is None:
            os.killpg(copy.pid, signal.SIGKILL)
    assert "uses the identity" in copy.child.last_line
    assert str(swarm.folder / "copy" / "identity.key") in copy.child.last_line
    assert guest.child.process.poll() is None, "the first of the two stays"


def test_sigkill_leaves_no_process_and_a_restart_goes_on(swarm: Swarm, guest: Node) -> None:
    helpers = psutil.Process(guest.pid).children(recursive=True)
    assert len(helpers) >= 2, "a trainer and a libp2p daemon"
    held = max(event["version"] for event in guest.events("round.version", group="block-0"))
    before = guest.started
    guest.signal(signal.SIGKILL)
    guest.child.process.wait()
    _, alive = psutil.wait_procs(helpers, timeout=20)
    assert not alive

    ports = ("--port", str(before["port"]), "--data-port", str(before["data_port"]))
    again = swarm.join(0, "guest", *ports)  # they are free at once
    swarm.nodes.remove(again)
    try:
        started = wait_for("a second start", lambda: again.events("node.started")[1:] or None)[0]
        assert started["peer"] == before["peer"]
        assert started["versions"]["block-0"] >= held
        wait_for("an update after the restart", lambda: accepted_after(again, "node.started", 2))
        leave(swarm, again)
    finally:
        if again.child.process.poll() is None:
            os.killpg(again.pid, signal.SIGKILL)


def leave(swarm: Swarm, node: Node) -> None:
    """Ctrl-C: the node says goodbye, ends with 0 and leaves nothing behind."""
    helpers = psutil.Process(node.pid).children(recursive=True)
    peer = node.started["peer"]
    node.signal(signal.SIGINT)
    assert node.child.process.wait(timeout=30) == 0
    assert node.events("node.stopped")
    _, alive = psutil.wait_procs(helpers, timeout=5)
    assert not alive
    deadline = time.monotonic() + 20
    while peer.encode() in swarm.command("status", "--json").stdout:
        assert time.monotonic() < deadline, "the swarm still counts a node that has left"
