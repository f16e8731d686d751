"""However often versions change behind a worker's back, an update is in the world once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import LENGTH, Submission
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import Manifest, Receipt, UpdateOutcome
from spheroid_node.wire.tensors import decode_vector

ROUNDS = 12


def manifest(version: int, *digests: bytes) -> Manifest:
    return Manifest(
        run="0" * 16, group="block-0", round=version, version=version, parent=bytes(32), digest=bytes(32),
        elements=1, rank=0, steps=1, total=version,
        updates=[
            UpdateOutcome(peer="a", digest=digest, tokens=1, norm=1.0, verdict=Verdict.ACCEPTED)
            for digest in digests
        ],
    )  # fmt: skip


@dataclass
class Play:
    """A worker whose round n teaches it the n-th unit vector, so that what is where can be read off."""

    worker: Contributor
    versions: dict[int, bytes | None] = field(default_factory=dict)
    """By version, the worker's update in it."""
    sent: dict[bytes, Submission] = field(default_factory=dict)

    def hands_in(self, round: int, refused: bool = False) -> bytes:
        learnt = np.zeros(ROUNDS, dtype=np.float32)
        learnt[round] = 1
        base = Base(round, bytes(32))
        submission = self.worker.prepare(round, base, learnt, 1, 1, bytes(16))
        digest = submission.header.digest
        self.sent[digest] = submission
        if refused:
            self.worker.answered(
                Receipt(
                    run="0" * 16, group="block-0", round=round, update=digest, verdict=Verdict.REFUSED,
                    reason=Reason.WORSE,
                )
            )  # fmt: skip
        return digest

    def looks(self) -> list[tuple[bytes, bool]]:
        """Returns what was recounted."""
        line = {
            version: manifest(version, *([] if digest is None else [digest]))
            for version, digest in self.versions.items()
        }
        self.worker.settle(line)
        return [(update.digest, update.contained) for update in self.worker.recount(line)]

    @property
    def world(self) -> list[float]:
        """How much of what each round taught is in versions and in what the worker holds."""
        total = self.worker.left_over.astype(np.float64)
        for digest in self.versions.values():
            if digest is not None:
                total = total + decode_vector(self.sent[digest].payload, "float32")
        return [round(float(value), 5) for value in total]


def play(decay: float) -> Play:
    model = ModelSpec(blocks=2, layers=1, width=16, heads=2, window=8)
    run = RunSpec(name="tiny", model=model, round=RoundSpec(compression="float32"))
    return Play(Contributor(run, "block-0", ROUNDS, decay))


def test_an_update_found_in_a_version_after_the_fork_that_carried_it_lost() -> None:
    """A is in a version unseen; B, which carries it, is in one that the worker makes and then gives up."""
    swarm = play(0.5)
    a = swarm.hands_in(0)
    swarm.versions = {}
    swarm.looks()
    b = swarm.hands_in(1)
    swarm.versions = {2: b}
    swarm.looks()
    assert swarm.world[:2] == [0.5, 1.0]
    swarm.versions = {1: a, 2: None}
    assert swarm.looks() == [(b, False), (a, True)]
    assert swarm.world[:2] == [1.0, 0.5]


def test_an_update_in_a_version_that_a_later_version_holds_by_another_as_well() -> None:
    swarm = play(0.5)
    a = swarm.hands_in(0)
    swarm.looks()
    b = swarm.hands_in(1)
    swarm.versions = {2: b}
    swarm.looks()
    c = swarm.hands_in(2)
    swarm.versions = {1: a, 2: b, 3: None}
    assert swarm.looks() == [(a, True)]
    assert swarm.world[:3] == [1.0, 1.0, 0.5], "the worker owes what the second version has too much"
    swarm.hands_in(3)
    swarm.looks()
    assert swarm.world[:4] == [1.0, 1.0, 0.25, 0.5], "and a debt does not fade"
    swarm.versions[3] = c
    assert swarm.looks() == [(c, True)]
    assert swarm.world[:4] == [1.0, 1.0, 1.0, 0.5]


def test_an_update_carried_by_one_that_was_refused_and_is_in_a_version_all_the_same() -> None:
    swarm = play(0.75)
    swarm.hands_in(0)
    swarm.looks()
    b = swarm.hands_in(1, refused=True)
    swarm.looks()
    assert swarm.world[:2] == [0.5625, 0.0]
    swarm.versions = {1: None, 2: b}
    assert swarm.looks() == [(b, True)]
    assert swarm.world[:2] == [1.0, 1.0], "three quarters in the version, and a quarter with the worker"


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[bool], int]]:
    """Round by round: of the last updates, which are in the version made from their base now, and how
    many of these versions were seen."""
    return [
        (draw(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)), draw(st.integers(0, LENGTH)))
        for _ in range(draw(st.integers(1, ROUNDS)))
    ]


@given(histories())
def test_no_update_is_lost_or_counted_twice(history: list[tuple[list[bool], int]]) -> None:
    """Without decay every update is in the world once, whatever the order in which a worker finds out."""
    swarm = play(1.0)
    digests: list[bytes] = []
    for round, (flags, seen) in enumerate(history):
        digests.append(swarm.hands_in(round))
        for age, flag in zip(range(LENGTH), flags, strict=True):
            if age < seen and age <= round:
                swarm.versions[round - age + 1] = digests[round - age] if flag else None
        swarm.looks()
        assert swarm.world == pytest.approx([1.0] * (round + 1) + [0.0] * (ROUNDS - round - 1), abs=1e-4)


@given(histories())
def test_what_is_in_a_version_is_not_with_the_worker(history: list[tuple[list[bool], int]]) -> None:
    """With decay, at every moment: once if a version has it, no more than that if none has."""
    swarm = play(0.75)
    digests: list[bytes] = []
    for round, (flags, seen) in enumerate(history):
        digests.append(swarm.hands_in(round))
        swarm.looks()  # decided before any of the versions below is seen
        for age, flag in zip(range(LENGTH), flags, strict=True):
            if age < seen and age <= round:
                swarm.versions[round - age + 1] = digests[round - age] if flag else None
        swarm.looks()
        remembered = range(max(0, round - LENGTH + 1), round + 1)
        for number in remembered:
            contained = swarm.versions.get(number + 1) == digests[number]
            share = swarm.world[number]
            assert share == pytest.approx(1.0, abs=1e-4) if contained else 0 < share < 1 + 1e-4


@given(histories(), st.lists(st.booleans(), min_size=ROUNDS, max_size=ROUNDS))
def test_a_refusal_takes_nothing_from_a_version_and_counts_nothing_twice(
    history: list[tuple[list[bool], int]], refused: list[bool]
) -> None:
    """Even where what was refused is in a version all the same."""
    swarm = play(0.75)
    digests: list[bytes] = []
    for round, (flags, seen) in enumerate(history):
        digests.append(swarm.hands_in(round, refused[round]))
        swarm.looks()
        for age, flag in zip(range(LENGTH), flags, strict=True):
            if age < seen and age <= round:
                swarm.versions[round - age + 1] = digests[round - age] if flag else None
        swarm.looks()
        for number in range(max(0, round - LENGTH + 1), round + 1):
            contained = swarm.versions.get(number + 1) == digests[number]
            share = swarm.world[number]
            assert share == pytest.approx(1.0, abs=1e-4) if contained else -1e-4 < share < 1 + 1e-4
        again = play(0.75).worker
        again.resume(swarm.worker.kept())
        assert again.left_over == pytest.approx(swarm.worker.left_over, abs=1e-4), "after a restart too"
