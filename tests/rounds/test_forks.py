from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.forks import choose, is_plausible
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import MAX_UPDATES, MAX_UPDATES_NAMED, Manifest, UpdateOutcome


def manifest(accepted: int = 1, late: int = 0, **changes: Any) -> Manifest:
    def outcome(index: int, verdict: Verdict, reason: Reason) -> UpdateOutcome:
        return UpdateOutcome(
            peer=f"{verdict}-{index}", digest=b"u" * 32, tokens=1, norm=1.0, verdict=verdict, reason=reason
        )

    fields: dict[str, Any] = {
        "run": "0" * 16,
        "group": "block-0",
        "round": 9,
        "version": 5,
        "parent": b"p" * 32,
        "digest": b"d" * 32,
        "elements": 6,
        "rank": 0,
        "steps": 10,
        "total": changes.get("version", 5) - 1 + accepted + len(changes.get("also", b"")) // 8,
        "updates": [outcome(index, Verdict.ACCEPTED, Reason.NONE) for index in range(accepted)]
        + [outcome(index, Verdict.LATE, Reason.AFTER_DEADLINE) for index in range(late)],
    }
    return Manifest(**(fields | changes))


BETTER_FIRST = [
    ("d", manifest(version=4, accepted=1, rank=6, digest=b"z" * 32, total=9)),
    ("c", manifest(version=6, accepted=1, rank=5, digest=b"z" * 32, total=7)),
    ("b", manifest(version=5, accepted=3, rank=4, digest=b"y" * 32)),
    ("b", manifest(version=5, accepted=2, late=9, rank=0, digest=b"y" * 32)),
    ("z", manifest(version=5, accepted=2, rank=1, digest=b"a" * 32)),
    ("a", manifest(version=5, accepted=2, rank=1, digest=b"b" * 32)),
    ("b", manifest(version=5, accepted=2, rank=1, digest=b"b" * 32)),
]


@pytest.mark.parametrize("index", range(len(BETTER_FIRST)))
def test_each_rule_decides_where_those_before_it_do_not(index: int) -> None:
    assert choose(reversed(BETTER_FIRST[index:])) == BETTER_FIRST[index]


def test_of_nothing_nothing_is_chosen() -> None:
    assert choose([]) is None


signed = st.tuples(
    st.sampled_from("abc"),
    st.builds(
        manifest,
        accepted=st.integers(1, 3),
        late=st.integers(0, 2),
        version=st.integers(1, 3),
        rank=st.integers(0, 2),
        digest=st.sampled_from([b"x" * 32, b"y" * 32]),
        steps=st.integers(0, 2),
    ),
)


@given(st.lists(signed, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_everyone_chooses_the_same_in_whatever_order_they_heard(
    manifests: list[tuple[str, Manifest]],
    random,  # type: ignore[no-untyped-def]
) -> None:
    shuffled = manifests.copy()
    random.shuffle(shuffled)
    chosen = choose(manifests)
    assert choose(shuffled) == chosen
    # Hearing them in two parts and choosing twice changes nothing either.
    half = [part for part in (choose(shuffled[:3]), choose(shuffled[3:])) if part]
    assert choose(half) == chosen


NOW = 1095.0  # round 9 of the tiny run


@pytest.mark.parametrize(
    ("changes", "plausible"),
    [
        ({}, True),
        ({"round": 10, "version": 11}, True),  # the signer's clock is a little ahead
        ({"round": 11}, False),
        ({"version": 11}, False),  # ten rounds make ten versions at most
        ({"run": "1" * 16}, False),
        ({"group": "block-2"}, False),
        ({"elements": 7}, False),
        ({"accepted": 0, "late": 2}, False),
        ({"total": 4}, False),  # four versions before it, and none of them with an update
        ({"total": 1 + 4 * MAX_UPDATES}, True),
        ({"total": 2 + 4 * MAX_UPDATES}, False),
    ],
)
def test_a_manifest_that_cannot_be_true_is_not_followed(
    run: RunSpec, changes: dict[str, Any], plausible: bool
) -> None:
    assert is_plausible(manifest(**({"run": run.run_id} | changes)), run, 6, NOW) is plausible


def test_a_manifest_with_an_update_longer_than_the_run_allows_is_not_followed(run: RunSpec) -> None:
    [outcome] = manifest().updates
    for norm, plausible in ((100.0, True), (100.1, False)):
        updates = [outcome.model_copy(update={"norm": norm})]
        assert is_plausible(manifest(run=run.run_id, updates=updates), run, 6, NOW) is plausible


def test_a_manifest_that_counts_a_worker_twice_is_not_followed(run: RunSpec) -> None:
    once = manifest(run=run.run_id)
    twice = once.model_copy(update={"updates": once.updates * 2})
    assert is_plausible(once, run, 6, NOW)
    assert not is_plausible(twice, run, 6, NOW)


def entries(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "big") for value in values)


@pytest.mark.parametrize(
    ("accepted", "also", "plausible"),
    [
        (MAX_UPDATES_NAMED, entries(1, 2, 3), True),
        (MAX_UPDATES_NAMED, entries(1, 3, 2), False),
        (MAX_UPDATES_NAMED, entries(1, 2, 2), False),
        (MAX_UPDATES_NAMED, entries(1, 2)[:-1], False),
        (MAX_UPDATES_NAMED - 1, entries(1), False),  # there was room to name it
        (MAX_UPDATES_NAMED, b"u" * 8, False),  # a named one once more
    ],
    ids=["sound", "unordered", "twice", "cut", "without need", "named too"],
)
def test_updates_beside_the_named_ones_count_once_each(
    run: RunSpec, accepted: int, also: bytes, plausible: bool
) -> None:
    crowded = manifest(accepted, run=run.run_id, also=also)
    assert is_plausible(crowded, run, 6, NOW) is plausible
    assert choose([("a", manifest(accepted)), ("b", manifest(accepted, also=entries(1)))]) == (
        "b",
        manifest(accepted, also=entries(1)),
    )
