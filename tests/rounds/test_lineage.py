from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.lineage import follows, is_within_reach, longest_update
from spheroid_node.rounds.outer import first_payload, next_payload
from spheroid_node.run import RunSpec, TrainingSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest, UpdateOutcome

PARENT = b"p" * 32


def manifest(*norms: float, late: float = 0.0, **changes: Any) -> Manifest:
    verdicts = [Verdict.ACCEPTED] * len(norms) + [Verdict.LATE]
    outcomes = [
        UpdateOutcome(peer=f"peer-{index}", digest=bytes(32), tokens=1, norm=norm, verdict=verdict)
        for index, (norm, verdict) in enumerate(zip((*norms, late), verdicts, strict=True))
    ]
    fields: dict[str, Any] = {
        "run": "0" * 16, "group": "block-0", "round": 9, "version": 5, "parent": PARENT,
        "digest": b"d" * 32, "elements": 6, "rank": 0, "steps": 13, "total": 12, "updates": outcomes,
    }  # fmt: skip
    return Manifest(**(fields | changes))


BEFORE = manifest(1.0, round=8, version=4, digest=PARENT, steps=10, total=10)


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"steps": 15}, True),
        ({"steps": 16}, False),  # a round makes five steps at most
        ({"steps": 9}, False),
        ({"total": 13}, False),
        ({"total": 11}, False),
        ({"version": 6}, False),
        ({"parent": b"x" * 32}, False),
        ({"round": 8}, False),
    ],
)
def test_a_version_follows_from_its_parent(run: RunSpec, changes: dict[str, Any], right: bool) -> None:
    assert follows(manifest(1.0, 2.0, **changes), BEFORE, run) is right


def test_the_first_version_follows_from_the_seed(run: RunSpec) -> None:
    first = manifest(1.0, version=1, total=1, steps=5, round=0)
    assert follows(first, None, run)
    assert not follows(first.model_copy(update={"total": 2}), None, run)
    assert not follows(manifest(1.0), None, run)


def test_the_longest_update_is_an_accepted_one(run: RunSpec) -> None:
    assert longest_update(manifest(3.0, 2.0, late=50.0), run) == 3.0
    median = run.model_copy(update={"round": run.round.model_copy(update={"aggregation": "median"})})
    assert longest_update(manifest(3.0, 2.0, 1.0, 1.0), median) == 6.0
    # Of updates that are not named nothing is known but that the run lets them be so long.
    assert longest_update(manifest(3.0, also=bytes(8)), run) == run.round.max_update_norm


updates = st.lists(st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3), min_size=1, max_size=5)


@given(updates, st.sampled_from(["average", "nesterov"]))
def test_what_updates_can_do_is_within_their_reach(mean_updates: list[list[float]], outer: str) -> None:
    training = TrainingSpec(outer=outer)  # type: ignore[arg-type]
    base = first_payload(training, np.array([5.0, -3.0, 0.5], dtype=np.float32))
    payload, norms = base, []
    for values in mean_updates:
        update = np.array(values, dtype=np.float32)
        norms.append(float(np.linalg.norm(update)))
        payload = next_payload(training, payload, update.copy())
    assert is_within_reach(training, base, payload, 3, norms)


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_what_they_cannot_do_is_not(outer: str) -> None:
    training = TrainingSpec(outer=outer)  # type: ignore[arg-type]
    base = first_payload(training, np.array([5.0, -3.0, 0.5], dtype=np.float32))
    reached = next_payload(training, base, np.array([2.0, 0.0, 0.0], dtype=np.float32))
    assert is_within_reach(training, base, reached, 3, [2.0])
    assert not is_within_reach(training, base, reached, 3, [1.9])
    assert is_within_reach(training, base, reached, 3, [1.2, 1.2])
    if outer == "nesterov":
        shaken = reached.copy()
        shaken[3:] += 1.0  # momentum that nothing explains moves the next version
        assert not is_within_reach(training, base, shaken, 3, [2.0])
