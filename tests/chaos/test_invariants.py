"""Every rule of the watch is broken on purpose: one that sees nothing would call any storm harmless."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import invariants as watch
from benchmarks.faulty_swarm import small_run
from benchmarks.invariants import Invariants
from spheroid_node.model.parameters import elements
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.node.outbox import Outbox
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import Submission
from spheroid_node.training.checkpoint import read_version, write_version
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, UpdateOutcome
from spheroid_node.wire.tensors import vector_digest

RUN = small_run("invariants", 0)
GROUP = "block-0"
SIZE = elements(RUN, GROUP)
KEY = ephemeral_identity()
CALM = {"worker-0": 0.0, "worker-2": 0.0}


def line(manifest: Manifest) -> dict[int, Manifest]:
    return {manifest.version: manifest}


class Play:
    """Nodes that are only files and log events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watch = Invariants(RUN, folder)
        self.worker = Contributor(RUN, GROUP, SIZE)

    def says(self, node: str, event: str, **fields: object) -> None:
        self.watch.observe(node, {"event": event, **fields})

    def follows(self, node: str, version: int, digest: bytes) -> None:
        self.says(
            node,
            "round.version",
            group=GROUP,
            version=version,
            digest=digest.hex(),
            round=version,
            total=version,
        )

    def keeps(self, node: str, version: int, parent: bytes, value: float, *updates: Submission) -> bytes:
        """Write a version whose parameters are all ``value``; returns its digest."""
        vector = np.full(SIZE, value, np.float32)
        manifest = Manifest(
            run=RUN.run_id,
            group=GROUP,
            round=version,
            version=version,
            parent=parent,
            digest=vector_digest(vector),
            elements=SIZE,
            rank=0,
            steps=0,
            total=version,
            updates=[
                UpdateOutcome(
                    peer=KEY.peer, digest=item.header.digest, tokens=1, norm=1.0, verdict=Verdict.ACCEPTED
                )
                for item in updates
            ],
        )
        path = self.folder / node / "versions" / GROUP / f"{version:08d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_version(path, RUN, GROUP, version, vector, manifest.seal(KEY.key))
        return manifest.digest

    def manifest(self, node: str, version: int) -> Manifest:
        path = self.folder / node / "versions" / GROUP / f"{version:08d}.safetensors"
        return Manifest.unseal(read_version(path, RUN, GROUP).manifest)[1]

    def hands_in(self, round: int, accepted: bool = True) -> Submission:
        """The worker's update of a round, which lies in its outbox afterwards."""
        update = np.random.default_rng(round).standard_normal(SIZE, dtype=np.float32)
        base = Base(round - 1, bytes(32))
        submission = self.worker.prepare(round, base, update, 1, 1, bytes(16))
        self.saves(round)
        if accepted:
            self.says(
                "worker-0",
                "round.receipt",
                group=GROUP,
                round=round,
                verdict="accepted",
                update=submission.header.digest.hex(),
                aggregator=KEY.peer,
            )
        return submission

    def forgets(self) -> None:
        """All that its worker held, without a word."""
        self.worker = Contributor(RUN, GROUP, SIZE)

    def saves(self, round: int) -> None:
        Outbox(RUN, self.folder / "worker-0" / "outbox").save(GROUP, self.worker.kept(), round)
        self.look()

    def look(self) -> None:
        self.watch.look(CALM)

    def ends(self) -> list[str]:
        self.watch.finish()
        return [violation.rule for violation in self.watch.violations]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


ZERO = bytes(32)


def test_what_is_as_it_should_be_breaks_no_rule(play: Play) -> None:
    digest = ZERO
    for round in range(1, 5):
        update = play.hands_in(round)
        play.keeps("worker-2", round, digest, float(round), update)
        digest = play.keeps("worker-0", round, digest, float(round), update)
        play.follows("worker-0", round, digest)
        play.follows("worker-2", round, digest)
        assert play.worker.settle(line(play.manifest("worker-0", round))) is True
        play.saves(round)
    assert play.ends() == []
    assert play.watch.agree()
    assert play.watch.counts["updates in a version"] == 4
    assert play.watch.counts["versions on the line"] == 4


# --- versions -------------------------------------------------------------------------------------


def test_a_lower_version_than_before(play: Play) -> None:
    play.follows("worker-0", 5, ZERO)
    play.follows("worker-0", 4, ZERO)
    assert play.ends() == ["shrunk"]


def test_a_lower_version_after_a_restart_is_wrong_unless_the_disk_was_full(play: Play) -> None:
    for node in ("worker-0", "worker-2"):
        play.follows(node, 5, ZERO)
    play.says("worker-0", "disk.not_written", what="versions")
    for node in ("worker-0", "worker-2"):
        play.says(node, "node.started", versions={GROUP: 4})
    assert [(item.rule, item.node) for item in play.watch.violations] == [("shrunk", "worker-2")]


def test_a_copy_of_another_group_begins_anew_with_its_node(play: Play) -> None:
    play.says("worker-0", "round.version", group="block-1", version=5, digest=ZERO.hex(), total=5)
    play.says("worker-0", "node.started", versions={GROUP: 0})
    play.says("worker-0", "round.version", group="block-1", version=4, digest=ZERO.hex(), total=4)
    assert play.ends() == []
    play.says("worker-0", "round.version", group="block-1", version=3, digest=ZERO.hex(), total=3)
    assert play.ends() == ["shrunk"]


def test_a_node_that_gives_way_to_a_swarm_with_more_updates_does_not_shrink(play: Play) -> None:
    play.says("worker-0", "round.version", group=GROUP, version=5, digest=ZERO.hex(), total=7)
    play.says("worker-0", "round.version", group=GROUP, version=4, digest=ZERO.hex(), total=8)
    assert play.ends() == []
    play.says("worker-0", "round.version", group=GROUP, version=6, digest=ZERO.hex(), total=7)
    assert play.ends() == ["shrunk"]


def test_two_versions_of_one_number_among_those_that_have_their_peace(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    play.follows("worker-0", 5, ZERO)
    play.follows("worker-2", 5, bytes(31) + b"1")
    for seconds in (0.0, 25.0, 50.0):
        monkeypatch.setattr(watch.time, "time", lambda seconds=seconds: now + seconds)
        play.watch.look({"worker-0": now - 100, "worker-2": math.inf})
    assert play.watch.violations == [], "one of them is being hurt"
    for seconds in (60.0, 70.0, 85.0):
        monkeypatch.setattr(watch.time, "time", lambda seconds=seconds: now + seconds)
        play.watch.look({"worker-0": now - 100, "worker-2": now - 100})
    assert [item.rule for item in play.watch.violations] == ["forked"]
    assert not play.watch.agree()


def test_a_fork_that_is_settled_in_time_is_none(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    play.follows("worker-0", 5, ZERO)
    play.follows("worker-2", 5, bytes(31) + b"1")
    for seconds in (0.0, 20.0, 40.0):
        monkeypatch.setattr(watch.time, "time", lambda seconds=seconds: now + seconds)
        play.watch.look({"worker-0": now - 100, "worker-2": now - 100})
        if seconds == 20.0:
            play.follows("worker-2", 5, ZERO)
    assert play.watch.violations == []


def test_a_version_beside_one_that_was_not_made_from_it(play: Play) -> None:
    play.keeps("worker-0", 5, ZERO, 5.0)
    play.keeps("worker-0", 6, bytes(31) + b"1", 6.0)
    play.look()
    assert play.watch.violations == [], "the next look may be at something else"
    play.look()
    assert play.ends() == ["unlinked"]


def test_a_version_that_cannot_be_read(play: Play) -> None:
    play.keeps("worker-0", 5, ZERO, 5.0)
    path = next((play.folder / "worker-0").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    play.look()
    assert play.ends() == ["damaged"]


def test_a_parameter_that_is_no_number(play: Play) -> None:
    play.keeps("worker-0", 5, ZERO, math.nan)
    play.look()
    assert play.ends() == ["not-finite"]


# --- updates --------------------------------------------------------------------------------------


def test_an_accepted_update_that_nobody_has(play: Play) -> None:
    play.hands_in(1)
    play.worker.settle({})
    play.forgets()
    play.saves(2)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0))
    play.look()
    assert play.ends() == ["lost"]


def test_an_accepted_update_whose_version_lost_is_carried_on_by_its_worker(play: Play) -> None:
    play.hands_in(1)
    play.worker.settle({})
    play.hands_in(2, accepted=False)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0))
    play.look()
    assert play.ends() == []
    assert play.watch.counts["updates kept by their worker"] == 1


def test_an_update_that_is_still_open_is_not_lost(play: Play) -> None:
    play.hands_in(1)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0))
    play.look()
    assert play.ends() == []


def test_an_update_that_its_worker_says_is_too_old_is_not_lost(play: Play) -> None:
    play.hands_in(1)
    play.says("worker-0", "outbox.too_old", group=GROUP, rounds=11)
    play.worker.settle({})
    play.forgets()
    play.saves(20)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0))
    play.look()
    assert play.ends() == []
    assert play.watch.counts["updates unknown"] == 1


def test_what_the_newest_version_seen_is_too_old_for_is_unknown(play: Play) -> None:
    """A version may be made after the last look: that it was not seen says nothing of its updates."""
    play.hands_in(1)
    play.worker.settle({})
    play.forgets()
    play.saves(2)
    first = play.keeps("worker-0", 1, ZERO, 1.0)
    play.look()
    play.hands_in(2)
    play.worker.settle({})
    play.forgets()
    play.saves(3)
    play.follows("worker-0", 1, first)
    play.follows("worker-2", 2, bytes(31) + b"2")
    assert play.ends() == ["lost"]
    assert play.watch.counts["updates unknown"] == 1


def test_an_update_in_two_versions(play: Play) -> None:
    update = play.hands_in(1)
    first = play.keeps("worker-0", 1, ZERO, 1.0, update)
    play.follows("worker-0", 2, play.keeps("worker-0", 2, first, 2.0, update))
    play.look()
    assert play.ends() == ["twice"]


def test_an_update_in_a_version_that_its_worker_sends_once_more(play: Play) -> None:
    update = play.hands_in(1)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0, update))
    play.worker.settle({})
    play.hands_in(2, accepted=False)
    assert play.ends() == ["twice"]


def test_a_worker_that_finds_out_later_takes_back_what_it_carried_on(play: Play) -> None:
    update = play.hands_in(1)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0, update))
    play.worker.settle({})
    play.hands_in(2, accepted=False)
    play.says("worker-0", "round.recounted", group=GROUP, update=update.header.digest.hex(), contained=True)
    play.look()
    assert play.ends() == []


def test_what_is_taken_back_of_one_update_is_not_missed_of_the_next(play: Play) -> None:
    """The second carries the first on; then the first is in a version after all, and the second is not."""
    first = play.hands_in(1)
    play.worker.settle({})
    second = play.hands_in(2)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0, first))
    (update,) = play.worker.recount(line(play.manifest("worker-0", 1)))
    play.says("worker-0", "round.recounted", group=GROUP, update=update.digest.hex(), contained=True)
    assert update.contained and update.digest == first.header.digest
    play.hands_in(3)
    play.follows("worker-0", 2, play.keeps("worker-0", 2, play.manifest("worker-0", 1).digest, 2.0))
    play.follows("worker-0", 3, play.keeps("worker-0", 3, play.manifest("worker-0", 2).digest, 3.0))
    play.look()
    assert play.ends() == []
    assert play.watch.counts["updates kept by their worker"] == 2
    assert second.header.digest.hex() in play.watch.accepted


def test_a_fork_that_carried_an_update_on_is_given_up(play: Play) -> None:
    """The first is in a version unseen; the second, which carries it, is in one that then loses to that."""
    first = play.hands_in(1)
    play.worker.settle({})
    second = play.hands_in(2)
    lost = play.keeps("worker-2", 2, ZERO, 9.0, second)
    play.worker.settle(line(play.manifest("worker-2", 2)))
    play.saves(2)
    one = play.keeps("worker-0", 1, ZERO, 1.0, first)
    two = play.keeps("worker-0", 2, one, 2.0)
    found = play.worker.recount({number: play.manifest("worker-0", number) for number in (1, 2)})
    for update in found:
        changed = {"update": update.digest.hex(), "contained": update.contained}
        play.says("worker-0", "round.recounted", group=GROUP, **changed)
    play.hands_in(3)
    play.follows("worker-0", 3, play.keeps("worker-0", 3, two, 3.0))
    play.look()
    assert lost != two and len(found) == 2 and play.ends() == []
    assert play.watch.counts["updates kept by their worker"] == 2, "the second, and the one still open"


def test_an_update_that_is_only_in_a_version_that_lost(play: Play) -> None:
    update = play.hands_in(1)
    play.keeps("worker-2", 1, ZERO, 3.0, update)
    assert play.worker.settle(line(play.manifest("worker-2", 1))) is True
    play.forgets()
    play.saves(2)
    play.follows("worker-0", 1, play.keeps("worker-0", 1, ZERO, 1.0))
    play.look()
    assert play.ends() == ["lost"]
