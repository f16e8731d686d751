"""A swarm in which nobody is reached by TCP: it trains and writes over libp2p all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spheroid_node.cli.demo.processes import Children

from .conftest import Node, Swarm, small_run, wait_for


@pytest.fixture
def walled(environment: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """Two blocks with two replicas each, all of which announce a port on which nobody listens."""
    folder = environment / "walled"
    folder.mkdir()
    monkeypatch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
    with Children(folder) as children:
        swarm = Swarm(folder, small_run(blocks=2), children)
        for number in range(4):
            swarm.join(number % 2, f"walled-{number}", "--announce-data-port", "1")
        yield swarm


def taken_by_another(node: Node) -> bool:
    """Whether another node has taken an update of this one, which then has travelled."""
    receipts = node.events("round.receipt", verdict="accepted")
    return any(receipt["aggregator"] != node.started["peer"] for receipt in receipts)


@pytest.mark.timeout(400)
def test_rounds_and_text(walled: Swarm) -> None:
    for node in walled.nodes:
        assert node.started["block"] == node.block
    for block in range(2):
        replicas = walled.of_group(f"block-{block}")
        wait_for(f"an update of block {block}", lambda of=replicas: any(map(taken_by_another, of)) or None)
    for node in walled.nodes:
        node.wait_for("round.version")
        node.wait_for("links.over_libp2p")
    said = walled.command("generate", "import a", "--bytes", "32")
    assert said.returncode == 0, said.stderr
    assert len(said.stdout) >= 32
