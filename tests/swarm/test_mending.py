"""What befalls home machines: a wrong clock, a long sleep, Ctrl-C in the middle of a round that they lead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wrong_clock import set_clock, wrong_clock
from spheroid_node.cli.demo.processes import Children
from spheroid_node.wire.records import NODE_TTL

from .conftest import Swarm, small_run, wait_for

pytestmark = pytest.mark.timeout(500)

GROUP = "block-0"


@pytest.fixture(scope="module")
def swarm(environment: Path) -> Iterator[Swarm]:
    """One block and three replicas, which stay well."""
    folder = environment / "mending"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, Children(folder) as children:
        patch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
        swarm = Swarm(folder, small_run(blocks=1), children)
        for number in range(3):
            swarm.join(0, f"well-{number}")
        for node in swarm.nodes:
            node.wait_for("round.receipt", group=GROUP, verdict="accepted")
        yield swarm


class Guest:
    """A further replica with a clock that a test sets."""

    def __init__(self, swarm: Swarm, name: str, clock: float = 0.0) -> None:
        self.clock = swarm.folder / f"{name}.clock"
        with wrong_clock(self.clock, clock):
            self.node = swarm.join(0, name)
        swarm.nodes.remove(self.node)

    def set_clock(self, seconds: float) -> None:
        set_clock(self.clock, seconds)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        if self.node.child.process.poll() is None:
            os.killpg(self.node.pid, signal.SIGKILL)

    def next_accepted(self) -> dict[str, object]:
        """Of a round that has not begun yet."""
        seen = max((event["round"] for event in self.node.events("round.receipt")), default=-1)
        receipts = wait_for(
            "an accepted update",
            lambda: [
                event
                for event in self.node.events("round.receipt", group=GROUP, verdict="accepted")
                if event["round"] > seen + 1
            ],
        )
        return receipts[0]


def says(swarm: Swarm, peer: str, what: str) -> bool | None:
    """Whether that is in the note of a node."""
    return what in notes(swarm).get(peer, "") or None


def notes(swarm: Swarm) -> dict[str, str]:
    status = json.loads(swarm.command("status", "--json").stdout)
    return {replica["peer"]: replica["note"] for replica in status["replicas"]}


def assert_told_in_turns(events: list[dict[str, Any]]) -> None:
    """Each thing once, until it is written: a disk that is nearly full takes a small file now and then."""
    missing = set()
    for event in events:
        if event["event"] == "disk.not_written":
            assert event["what"] not in missing, f"{event['what']} is told twice"
            missing.add(event["what"])
        elif event["event"] == "disk.written_again":
            missing.remove(event["what"])


def test_machines_whose_clock_is_off_work_and_are_told(swarm: Swarm) -> None:
    with Guest(swarm, "fast", 600.0) as fast, Guest(swarm, "slow", -600.0) as slow:
        guests = {"fast": (fast, 600.0), "slow": (slow, -600.0)}
        for way, (guest, seconds) in guests.items():
            told = guest.node.wait_for("clock.off")
            assert abs(told["seconds"] - seconds) < 3 and "NTP" in told["remedy"]
            guest.next_accepted()
            peer = guest.node.started["peer"]
            wait_for("its note", partial(says, swarm, peer, f"s {way}"))
            guest.set_clock(0.0)  # its owner sets it right
        for guest, _ in guests.values():
            guest.node.wait_for("clock.right")
            guest.next_accepted()
        fast.set_clock(-600.0)  # and somebody sets it wrong again
        wait_for("another word", lambda: len(fast.node.events("clock.off")) > 1)
        fast.next_accepted()


def test_a_full_disk_is_told_and_the_node_goes_on(swarm: Swarm) -> None:
    state = swarm.folder / "full"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(state)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with Guest(swarm, "full") as guest:
            guest.next_accepted()
            filler = state / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            told = guest.node.wait_for("disk.not_written")
            assert told["cause"] == "no space left on device" and "room" in told["remedy"]
            guest.next_accepted()
            peer = guest.node.started["peer"]
            wait_for("its note", partial(says, swarm, peer, "not on disk"))
            assert_told_in_turns(guest.node.child.events())
            filler.unlink()
            guest.node.wait_for("disk.written_again", what="versions")
            guest.next_accepted()
            newest = max(event["version"] for event in guest.node.events("round.version", group=GROUP))
            wait_for(
                "the newest version on disk",
                lambda: [f for f in state.glob(f"versions/{GROUP}/*") if f.name >= f"{newest:08d}"] or None,
            )
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)


def test_a_machine_that_slept_catches_up(swarm: Swarm) -> None:
    """Long enough for its record to expire, and for many rounds."""
    with Guest(swarm, "sleeper") as guest:
        guest.next_accepted()
        os.killpg(guest.node.pid, signal.SIGSTOP)
        peer = guest.node.started["peer"]
        try:
            asleep = time.monotonic()
            wait_for("its record to expire", lambda: peer not in notes(swarm) or None)
            assert time.monotonic() - asleep > NODE_TTL / 3
        finally:
            os.killpg(guest.node.pid, signal.SIGCONT)
        missed = max(event["version"] for event in swarm.nodes[0].events("round.version", group=GROUP))
        newest = wait_for(
            "the newest version",
            lambda: [e for e in guest.node.events("round.version", group=GROUP) if e["version"] >= missed],
        )
        assert newest
        guest.next_accepted()
        assert peer in wait_for("its record", lambda: {p: n for p, n in notes(swarm).items() if p == peer})


def test_an_aggregator_that_leaves_loses_no_round(swarm: Swarm) -> None:
    """Ctrl-C while it collects: it finishes the round, or the next in rank does, and it is gone soon."""
    with Guest(swarm, "leader") as guest:
        guest.next_accepted()
        leader = guest.node.started["peer"]

        def taken() -> dict[str, object] | None:
            """An update of another that the guest has taken, and whose version is not made yet."""
            for node in swarm.nodes:
                taken = node.events("round.receipt", group=GROUP, aggregator=leader, verdict="accepted")[-1:]
                for event in taken:
                    if not node.events("round.version", group=GROUP, round=event["round"]):
                        return event
            return None

        receipt = wait_for("an open round that it leads", taken)
        asked = time.monotonic()
        guest.node.signal(signal.SIGINT)
        assert guest.node.child.process.wait(timeout=30) == 0
        assert time.monotonic() - asked < 10
        version = wait_for(
            "a version of that round or a later one",
            lambda: [
                event
                for node in (guest.node, *swarm.nodes)
                for event in node.events("round.led", group=GROUP)
                if event["round"] >= receipt["round"]
            ],
        )[0]
        assert version["round"] == receipt["round"]
        assert version["accepted"] >= 2
