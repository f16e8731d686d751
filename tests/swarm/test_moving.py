"""A machine gets another address while its node runs: two network namespaces and a cable between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spheroid_node.cli.demo import processes
from spheroid_node.cli.demo.processes import Children

from . import conftest
from .conftest import Node, Swarm, small_run, wait_for

pytestmark = pytest.mark.timeout(300)

BEFORE, AFTER = "10.77.0.2", "10.77.0.3"
HOME = "10.77.0.1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """Two namespaces, each an end of one cable."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"spheroid-{os.getpid()}-{end}" for end in ("home", "away")]
        self._folder = folder
        home, away = self.names
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", home, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", away)
        for name in self.names:
            ip("-n", name, "link", "set", "cable", "up")
        ip("-n", home, "address", "add", f"{HOME}/24", "dev", "cable")
        ip("-n", home, "route", "add", "default", "via", BEFORE)
        self.give(BEFORE)

    def give(self, address: str) -> None:
        """The machine away has this address, and no other any more."""
        away = self.names[1]
        ip("-n", away, "address", "flush", "dev", "cable")
        ip("-n", away, "address", "add", f"{address}/24", "dev", "cable")
        ip("-n", away, "route", "add", "default", "via", HOME)

    def python(self, end: int) -> str:
        """An interpreter that runs at one end."""
        script = self._folder / f"python-{end}"
        script.write_text(f'#!/bin/sh\nexec ip netns exec {self.names[end]} {sys.executable} "$@"\n')
        script.chmod(0o755)
        return str(script)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Cable]:
    made = None
    try:
        try:
            made = Cable(tmp_path)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        if made is not None:
            made.remove()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, cable: Cable):  # type: ignore[no-untyped-def]
    """Choose the end at which what is started from now on runs."""

    def choose(end: int) -> None:
        for module in (processes, conftest):
            monkeypatch.setattr(module, "sys", SimpleNamespace(executable=cable.python(end)))

    return choose


def test_a_node_whose_address_changes_is_found_at_the_new_one(
    environment: Path, monkeypatch: pytest.MonkeyPatch, cable: Cable, at
) -> None:
    folder = environment / "moving"
    folder.mkdir()
    monkeypatch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setattr(conftest, "LOOPBACK", "0.0.0.0")
    with Children(folder) as children:
        at(0)
        swarm = Swarm(folder, small_run(blocks=1), children)
        join = wait_for("the address", lambda: (folder / "bootstrap" / "join.txt").read_text().split())
        swarm.address = join[-1]
        assert f"/ip4/{HOME}/" in swarm.address
        resident = swarm.join(0, "resident")
        at(1)
        mover = swarm.join(0, "mover")
        at(0)
        peer = mover.started["peer"]
        assert host_of(swarm, peer) == BEFORE
        wait_for("an update of the mover", lambda: exchanged(resident, mover, 0) or None)

        cable.give(AFTER)
        told = mover.wait_for("dht.address_changed")
        assert (told["before"], told["now"]) == (BEFORE, AFTER)
        assert mover.wait_for("node.address")["host"] == AFTER
        wait_for("its record", lambda: host_of(swarm, peer) == AFTER or None)
        round = max(event["round"] for event in mover.events("round.trained"))
        wait_for("updates from one to the other again", lambda: exchanged(resident, mover, round + 1) or None)
        assert mover.child.process.poll() is None


def host_of(swarm: Swarm, peer: str) -> str | None:
    status = json.loads(swarm.command("status", "--json").stdout or '{"replicas": []}')
    return next((replica["host"] for replica in status["replicas"] if replica["peer"] == peer), None)


def exchanged(one: Node, other: Node, since: int) -> bool:
    """Whether each has taken an update of the other."""

    def taken(author: Node, aggregator: Node) -> bool:
        receipts = author.events("round.receipt", verdict="accepted", aggregator=aggregator.started["peer"])
        return any(receipt["round"] >= since for receipt in receipts)

    return taken(one, other) and taken(other, one)
