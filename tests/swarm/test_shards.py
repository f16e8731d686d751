"""A real swarm whose blocks are cut into shards and whose outer step has momentum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spheroid_node.cli.demo.processes import Children
from spheroid_node.model import load

from .conftest import Node, Swarm, small_run, wait_for

ROUNDS = 3


@pytest.fixture
def sharded(environment: Path) -> Iterator[Swarm]:
    """Two blocks, two replicas each; every shard elects its own aggregator."""
    run = small_run(blocks=2, period=8.0, settle=3.5, shards=2, shard_above=1)
    training = run.training.model_copy(update={"outer": "nesterov"})
    run, folder = run.model_copy(update={"training": training}), environment / "shards"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, Children(folder) as children:
        patch.setenv("SPHEROID_RUNTIME_DIR", str(folder / "runtime"))
        swarm = Swarm(folder, run, children)
        for number in range(4):
            swarm.join(number % 2, f"shards-{number}")
        for node in swarm.nodes:
            assert node.started["block"] == node.block
        yield swarm


@pytest.mark.timeout(600)
def test_shards_have_versions_of_their_own_and_write_one_text(sharded: Swarm, tmp_path: Path) -> None:
    for group in sharded.run.groups:
        members = sharded.of_group(group.partition(".")[0])

        def common(group: str = group, members: list[Node] = members) -> dict[int, set[str]] | None:
            """Digests by version of those that all members have adopted."""
            held = [
                {event["version"]: event["digest"] for event in node.events("round.version", group=group)}
                for node in members
            ]
            versions = set.intersection(*map(set, held))
            return {v: {of[v] for of in held} for v in versions} if len(versions) >= ROUNDS else None

        digests = wait_for(f"{ROUNDS} versions of {group} on all its replicas", common)
        assert all(len(found) == 1 for found in digests.values()), digests
        assert len(set.union(*digests.values())) == len(digests), "parameters stand still"

    texts = [sharded.command("generate", "The ", "--bytes", "12", "--seed", "3") for _ in range(2)]
    assert [done.returncode for done in texts] == [0, 0], texts[0].stderr
    assert all(done.stdout for done in texts)

    exported = sharded.command("export", str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    assert sum(parameter.numel() for parameter in load(str(tmp_path / "model")).parameters()) > 0
