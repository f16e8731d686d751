from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spheroid_node.rounds.collection import ACCEPTED, LATE, Answer, Base, Collection
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import MAX_UPDATES, MAX_UPDATES_NAMED, Manifest, UpdateOutcome

NOW = 1075.0
DEADLINE = 1078.0
Make = Callable[..., Any]


def refused(reason: Reason) -> Answer:
    return Answer(Verdict.REFUSED, reason)


def submit(collection: Collection, author: str, parcel: Any, now: float = NOW) -> Answer:
    answer = collection.header(author, parcel.header, now)
    return answer if answer is not None else collection.payload(author, parcel.facts, now)


# --- the acceptance table -------------------------------------------------------------------------


def test_a_sound_update_is_accepted(collect: Make, parcel: Make) -> None:
    collection, sound = collect("a"), parcel()
    assert collection.header("a", sound.header, NOW) is None
    assert collection.payload("a", sound.facts, NOW) == ACCEPTED
    assert collection.accepted() == ["a"]


HEADERS: list[tuple[dict[str, Any], Reason]] = [
    ({"run": "f" * 16}, Reason.WRONG_RUN),
    ({"group": "block-1"}, Reason.WRONG_GROUP),
    ({"round": 8}, Reason.WRONG_ROUND),
    ({"base": 3}, Reason.STALE_BASE),
    ({"base_digest": b"x" * 32}, Reason.STALE_BASE),
    ({"elements": 7}, Reason.BAD_SHAPE),
    ({"dtype": "float32"}, Reason.BAD_DTYPE),
    ({"tokens": 0}, Reason.BAD_WEIGHT),
    ({"steps": 0}, Reason.BAD_WEIGHT),
    ({"steps": 4}, Reason.BAD_WEIGHT),  # 4 steps are 64 bytes, the header claims 80
    ({"norm": 101.0}, Reason.NORM_TOO_LARGE),
]


@pytest.mark.parametrize(("changes", "reason"), HEADERS)
def test_a_header_is_refused_before_its_payload_is_taken(
    collect: Make, parcel: Make, changes: dict[str, Any], reason: Reason
) -> None:
    collection = collect("a")
    assert collection.header("a", parcel(**changes).header, NOW) == refused(reason)
    assert collection.accepted() == []


PAYLOADS: list[tuple[dict[str, Any], Reason]] = [
    ({"size": 10}, Reason.BAD_SHAPE),
    ({"digest": b"x" * 32}, Reason.BAD_DIGEST),
    ({"finite": False}, Reason.NOT_FINITE),
    ({"norm": 101.0}, Reason.NORM_TOO_LARGE),
    ({"worse_by": 0.1001}, Reason.WORSE),
    ({"worse_by": float("nan")}, Reason.WORSE),
    ({"worse_by": float("inf")}, Reason.WORSE),
]


@pytest.mark.parametrize(("changes", "reason"), PAYLOADS)
def test_a_payload_is_refused_for_what_it_is(
    collect: Make, parcel: Make, changes: dict[str, Any], reason: Reason
) -> None:
    collection, sound = collect("a"), parcel()
    collection.header("a", sound.header, NOW)
    assert collection.payload("a", replace(sound.facts, **changes), NOW) == refused(reason)
    assert collection.accepted() == []


def test_an_update_is_tried_only_if_the_run_screens_and_nothing_else_is_wrong_with_it(
    run: RunSpec, collect: Make, parcel: Make
) -> None:
    collection, sound = collect("a"), parcel()
    assert not collection.is_worth_trying("a", sound.facts, NOW), "its header has not come"
    collection.header("a", sound.header, NOW)
    assert collection.is_worth_trying("a", sound.facts, NOW)
    assert not collection.is_worth_trying("a", replace(sound.facts, finite=False), NOW)
    assert not collection.is_worth_trying("a", sound.facts, DEADLINE)
    collection.run = run.model_copy(update={"round": run.round.model_copy(update={"screen": 0.0})})
    assert not collection.is_worth_trying("a", sound.facts, NOW)


@pytest.mark.parametrize("worse_by", [None, -0.5, 0.1])
def test_what_is_no_worse_than_the_run_allows_is_accepted(
    collect: Make, parcel: Make, worse_by: float | None
) -> None:
    collection, sound = collect("a"), parcel()
    collection.header("a", sound.header, NOW)
    assert collection.payload("a", replace(sound.facts, worse_by=worse_by), NOW) == ACCEPTED


def test_a_payload_of_nan_is_refused(collect: Make, parcel: Make) -> None:
    assert submit(collect("a"), "a", parcel(float("nan"))) == refused(Reason.NOT_FINITE)


def test_an_author_without_a_replica_is_not_eligible(collect: Make, parcel: Make) -> None:
    collection = collect("a")
    assert submit(collection, "b", parcel()) == refused(Reason.NOT_ELIGIBLE)
    assert not collection.knows("b")
    collection.expect(["a", "b"])
    assert submit(collection, "b", parcel()) == ACCEPTED


def test_an_author_that_the_run_does_not_list_is_not_eligible(
    run: RunSpec, collect: Make, parcel: Make
) -> None:
    listed = run.model_copy(update={"access": ("a" * 40,)})
    collection = collect("a" * 40, "b" * 40, run=listed)
    assert submit(collection, "b" * 40, parcel(run=listed.run_id)) == refused(Reason.NOT_ELIGIBLE)
    assert submit(collection, "a" * 40, parcel(run=listed.run_id)) == ACCEPTED


def test_a_second_update_of_an_author_is_a_duplicate(collect: Make, parcel: Make) -> None:
    collection = collect("a")
    submit(collection, "a", parcel(1.0))
    assert submit(collection, "a", parcel(2.0)) == refused(Reason.DUPLICATE)
    assert [outcome.verdict for outcome in collection.outcomes()] == [Verdict.ACCEPTED]


@pytest.mark.parametrize("changes", [{"nonce": b"m" * 16}, {"tokens": 8}, {"norm": 2.0}])
def test_the_same_content_signed_anew_is_a_second_update(
    collect: Make, parcel: Make, changes: dict[str, Any]
) -> None:
    collection = collect("a")
    assert submit(collection, "a", parcel()) == ACCEPTED
    assert submit(collection, "a", parcel(**changes)) == refused(Reason.DUPLICATE)
    assert submit(collection, "a", parcel()) == ACCEPTED, "which is the answer that it had"
    assert collection.accepted() == ["a"]


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_the_same_update_again_gets_its_first_answer_even_after_the_deadline(
    collect: Make, parcel: Make, value: float
) -> None:
    collection, same = collect("a", "b"), parcel(value)
    first = submit(collection, "a", same)
    assert submit(collection, "a", same) == first
    collection.close()
    assert submit(collection, "a", same, DEADLINE + 1) == first
    assert len(collection.outcomes()) == 1


def test_the_same_bytes_in_another_round_are_another_update(collect: Make, parcel: Make) -> None:
    collection = collect("a")
    submit(collection, "a", parcel())
    assert collection.header("a", parcel(round=6).header, NOW) == LATE


def test_two_connections_with_one_update_count_once(collect: Make, parcel: Make) -> None:
    collection, same = collect("a"), parcel()
    assert collection.header("a", same.header, NOW) is None
    assert collection.header("a", same.header, NOW) is None
    assert collection.payload("a", same.facts, NOW) == ACCEPTED
    assert collection.payload("a", same.facts, NOW) == ACCEPTED
    assert collection.accepted() == ["a"]


def test_a_worker_that_restarts_during_its_upload_may_send_another_update(
    collect: Make, parcel: Make
) -> None:
    collection = collect("a")
    assert collection.header("a", parcel(1.0).header, NOW) is None
    assert submit(collection, "a", parcel(2.0)) == ACCEPTED


def test_a_refused_header_may_be_mended(collect: Make, parcel: Make) -> None:
    collection = collect("a")
    assert submit(collection, "a", parcel(base=3)) == refused(Reason.STALE_BASE)
    assert submit(collection, "a", parcel()) == ACCEPTED


def test_a_refused_payload_may_not(collect: Make, parcel: Make) -> None:
    collection = collect("a")
    submit(collection, "a", parcel(float("nan")))
    assert submit(collection, "a", parcel()) == refused(Reason.DUPLICATE)


def test_a_payload_without_a_header_is_a_fault_of_the_caller(collect: Make, parcel: Make) -> None:
    with pytest.raises(ValueError, match="without a header"):
        collect("a").payload("a", parcel().facts, NOW)


def test_what_a_manifest_does_not_name_stands_beside(collect: Make, parcel: Make) -> None:
    """The first 64 by peer id are named; of the others each digest has an entry, once."""
    authors = [f"p{index:04}" for index in range(MAX_UPDATES_NAMED + 3)]
    values = [*range(1, MAX_UPDATES_NAMED + 3), MAX_UPDATES_NAMED + 2]
    sent = [parcel(value / 16) for value in values]
    collection = collect(*authors)
    for author, update in reversed(list(zip(authors, sent, strict=True))):
        assert submit(collection, author, update) == ACCEPTED
    assert [outcome.peer for outcome in collection.outcomes()] == authors[:MAX_UPDATES_NAMED]
    beside = {update.header.digest[:8] for update in sent[MAX_UPDATES_NAMED:]}
    assert len(beside) == 2, "the last two updates are the same to the byte"
    assert collection.also() == b"".join(sorted(beside))
    late = collect(*authors)
    for author in authors:
        submit(late, author, parcel(round=6))
    assert late.also() == b""


def test_a_limit_is_that_of_all_norms_known_before(collect: Make, parcel: Make) -> None:
    """Of the base's 1, 2 and 3, and of what was accepted in this round; what was withdrawn counts no more."""
    collection = collect("a", "b", "c")
    for author, value in (("a", 10.0), ("b", 20.0)):
        submit(collection, author, parcel([value, 0, 0, 0, 0, 0]))
    assert collection.scale("a") == pytest.approx(3 * 2 / 10)
    assert collection.scale("b") == pytest.approx(3 * 2.5 / 20)
    collection.withdraw("b")
    submit(collection, "c", parcel([50.0, 0, 0, 0, 0, 0]))
    assert collection.scale("c") == pytest.approx(3 * 2.5 / 50)


def test_more_updates_than_a_manifest_has_room_for(collect: Make, parcel: Make) -> None:
    authors = [f"p{index:04}" for index in range(MAX_UPDATES + 2)]
    collection = collect(*authors)
    slow = parcel(0.5)
    assert collection.header(authors[-1], slow.header, NOW) is None
    for author in authors[:MAX_UPDATES]:
        assert submit(collection, author, parcel()) == ACCEPTED
    assert submit(collection, authors[-2], parcel()) == refused(Reason.NO_ROOM)
    assert collection.payload(authors[-1], slow.facts, NOW) == refused(Reason.NO_ROOM)
    outcomes = collection.outcomes()
    assert len(outcomes) == MAX_UPDATES_NAMED
    assert all(outcome.verdict is Verdict.ACCEPTED for outcome in outcomes)


def test_a_crowd_of_late_updates_does_not_push_an_accepted_one_out(collect: Make, parcel: Make) -> None:
    authors = [f"p{index:03}" for index in range(MAX_UPDATES_NAMED + 1)]
    collection = collect(*authors)
    for author in authors[:-1]:
        submit(collection, author, parcel(round=6))
    submit(collection, authors[-1], parcel())
    outcomes = collection.outcomes()
    assert len(outcomes) == MAX_UPDATES_NAMED
    assert outcomes[-1].verdict is Verdict.ACCEPTED


def test_every_reason_has_its_test() -> None:
    tabled = {reason for _, reason in HEADERS + PAYLOADS}
    alone = {Reason.NONE, Reason.AFTER_DEADLINE, Reason.NOT_ELIGIBLE, Reason.DUPLICATE, Reason.NO_ROOM}
    assert tabled | alone == set(Reason)


# --- the deadline ---------------------------------------------------------------------------------


def test_a_header_at_the_deadline_is_late(collect: Make, parcel: Make) -> None:
    assert collect("a").header("a", parcel().header, DEADLINE - 1e-3) is None
    assert collect("a").header("a", parcel().header, DEADLINE) == LATE


def test_a_payload_that_ends_after_the_deadline_is_late(collect: Make, parcel: Make) -> None:
    collection, sound = collect("a"), parcel()
    collection.header("a", sound.header, DEADLINE - 1e-3)
    assert collection.payload("a", sound.facts, DEADLINE) == LATE
    assert collection.accepted() == []
    assert [outcome.verdict for outcome in collection.outcomes()] == [Verdict.LATE]


def test_an_update_of_an_earlier_round_is_late_and_its_author_still_waited_for(
    collect: Make, parcel: Make
) -> None:
    collection = collect("a")
    assert collection.header("a", parcel(round=6).header, NOW) == LATE
    assert collection.waiting_for() == {"a"}
    assert submit(collection, "a", parcel()) == ACCEPTED


def test_after_closing_everything_is_late(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b")
    submit(collection, "a", parcel())
    collection.close()
    assert submit(collection, "b", parcel()) == LATE
    assert collection.is_over(NOW)


def test_a_payload_that_is_on_its_way_at_the_closing_is_late(collect: Make, parcel: Make) -> None:
    collection, sound = collect("a"), parcel()
    collection.header("a", sound.header, NOW)
    collection.close()
    assert collection.is_over(NOW)
    assert collection.payload("a", sound.facts, NOW) == LATE
    assert collection.accepted() == []


def test_a_round_is_over_once_everyone_was_heard(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b", "c")
    submit(collection, "a", parcel())
    submit(collection, "b", parcel(float("nan")))
    assert collection.waiting_for() == {"c"}
    assert not collection.is_over(NOW)
    submit(collection, "c", parcel())
    assert collection.is_over(NOW)


def test_without_news_a_round_is_over_at_its_deadline(collect: Make) -> None:
    collection = collect("a")
    assert not collection.is_over(DEADLINE - 1e-3)
    assert collection.is_over(DEADLINE)


def test_a_round_that_expects_nobody_lasts_until_its_deadline(collect: Make) -> None:
    assert not collect().is_over(NOW)


def test_who_has_left_is_not_waited_for_but_who_is_sending_is(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b", "c")
    collection.header("b", parcel().header, NOW)
    collection.expect(["a"])
    assert collection.waiting_for() == {"a", "b"}


# --- weights, clipping, steps ---------------------------------------------------------------------


def test_a_weight_is_capped_by_what_the_run_lets_a_worker_train(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b")
    submit(collection, "a", parcel(steps=50, tokens=800))
    submit(collection, "b", parcel(steps=2, tokens=30))
    assert (collection.weight("a"), collection.weight("b")) == (80.0, 30.0)


def test_an_update_above_the_clip_factor_is_scaled_down_to_it(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b")
    # Norms behind the base: 1, 2, 3. Median 2, factor 3: the limit is 6.
    submit(collection, "a", parcel([12.0, 0, 0, 0, 0, 0]))
    assert collection.scale("a") == pytest.approx(0.5)
    # Now 1, 2, 3, 12: median 2.5, limit 7.5.
    submit(collection, "b", parcel([7.0, 0, 0, 0, 0, 0]))
    assert collection.scale("b") == 1.0


def test_an_outlier_has_no_say_in_its_own_limit(run: RunSpec, parcel: Make) -> None:
    collection = Collection(run, "block-0", 7, replace_norms(()), 6, ["a", "b"])
    submit(collection, "a", parcel([1.0, 0, 0, 0, 0, 0]))
    submit(collection, "b", parcel([60.0, 0, 0, 0, 0, 0]))
    assert (collection.scale("a"), collection.scale("b")) == (1.0, pytest.approx(0.05))


def test_an_update_of_zeros_clips_nobody(run: RunSpec, parcel: Make) -> None:
    collection = Collection(run, "block-0", 7, replace_norms((0.0,)), 6, ["a", "b"])
    submit(collection, "a", parcel(0.0))
    submit(collection, "b", parcel(1.0))
    assert (collection.scale("a"), collection.scale("b")) == (1.0, 1.0)


@pytest.mark.parametrize("rule", ["mean", "trimmed-mean", "median"])
def test_other_rules_clip_nothing(run: RunSpec, collect: Make, parcel: Make, rule: str) -> None:
    plain = run.model_copy(update={"round": run.round.model_copy(update={"aggregation": rule})})
    collection = collect("a", run=plain)
    submit(collection, "a", parcel([90.0, 0, 0, 0, 0, 0], run=plain.run_id))
    assert collection.scale("a") == 1.0


def test_steps_grow_by_the_mean_of_the_accepted(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b", "c", "d")
    assert collection.steps() == 100
    submit(collection, "a", parcel(steps=5))
    submit(collection, "b", parcel(steps=2, tokens=30))
    submit(collection, "c", parcel(steps=900, tokens=80))  # counts as the 5 that the run allows
    submit(collection, "d", parcel(float("nan"), steps=5))
    assert collection.steps() == 104


def test_outcomes_are_in_the_order_of_peer_ids(collect: Make, parcel: Make) -> None:
    collection = collect("a", "b", "c")
    submit(collection, "c", parcel(2.0))
    submit(collection, "a", parcel(base=3))
    submit(collection, "b", parcel(round=6))
    submit(collection, "stranger", parcel())
    assert [(o.peer, o.verdict, o.reason) for o in collection.outcomes()] == [
        ("a", Verdict.REFUSED, Reason.STALE_BASE),
        ("b", Verdict.LATE, Reason.AFTER_DEADLINE),
        ("c", Verdict.ACCEPTED, Reason.NONE),
    ]
    assert collection.outcomes()[2].norm == pytest.approx(24**0.5)


def test_a_base_knows_the_norms_that_its_manifest_accepted() -> None:
    def outcome(peer: str, norm: float, verdict: Verdict) -> UpdateOutcome:
        return UpdateOutcome(peer=peer, digest=b"d" * 32, tokens=1, norm=norm, verdict=verdict)

    manifest = Manifest(
        run="0" * 16, group="block-0", round=6, version=4, parent=b"p" * 32, digest=b"d" * 32,
        elements=6, rank=0, steps=90, total=7,
        updates=[outcome("a", 1.5, Verdict.ACCEPTED), outcome("b", 9.0, Verdict.LATE)],
    )  # fmt: skip
    assert Base.of(manifest) == Base(4, b"d" * 32, 90, (1.5,), 7)


def replace_norms(norms: tuple[float, ...]) -> Base:
    return Base(version=4, digest=b"b" * 32, steps=100, norms=norms)


# --- whatever happens -----------------------------------------------------------------------------

events = st.lists(
    st.tuples(st.sampled_from("abcx"), st.sampled_from([1.0, 2.0, float("nan")]), st.floats(1070, 1080)),
    max_size=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events)
def test_whatever_comes_each_author_counts_at_most_once_and_only_in_time(
    collect: Make, parcel: Make, events: list[tuple[str, float, float]]
) -> None:
    collection = collect("a", "b", "c")
    accepted: dict[str, float] = {}
    for author, value, now in sorted(events, key=lambda event: event[2]):
        if submit(collection, author, parcel(value), now) == ACCEPTED:
            assert accepted.setdefault(author, value) == value
            assert now < DEADLINE or author in collection.accepted()
    assert sorted(collection.accepted()) == sorted(accepted)
    assert {o.peer for o in collection.outcomes() if o.verdict is Verdict.ACCEPTED} == set(accepted)
    assert set(accepted) <= set("abc")
