from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import Submission
from spheroid_node.run import RoundSpec, RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import Manifest, Receipt, UpdateOutcome
from spheroid_node.wire.tensors import INT8_ELEMENTS, Vector, decode_vector, payload_digest

BASE = Base(version=4, digest=b"b" * 32)
UPDATE = np.array([1.0, -2.0], dtype=np.float32)
ZERO = np.zeros(2, dtype=np.float32)


@pytest.fixture
def contributor(run: RunSpec) -> Contributor:
    return Contributor(run, "block-0", 2, decay=0.5)


def send(contributor: Contributor, update: Any = UPDATE, round: int = 7) -> Submission:
    return contributor.prepare(round, BASE, update, steps=5, tokens=80, nonce=b"n" * 16)


def receipt(submission: Submission, verdict: Verdict, reason: Reason = Reason.NONE) -> Receipt:
    header = submission.header
    return Receipt(
        run=header.run, group=header.group, round=header.round, update=header.digest,
        verdict=verdict, reason=reason,
    )  # fmt: skip


def manifest(digest: bytes, version: int = 5, verdict: Verdict = Verdict.ACCEPTED) -> Manifest:
    outcome = UpdateOutcome(peer="a", digest=digest, tokens=80, norm=1.0, verdict=verdict)
    return Manifest(
        run="0" * 16, group="block-0", round=7, version=version, parent=b"b" * 32, digest=b"c" * 32,
        elements=2, rank=0, steps=5, total=version, updates=[outcome],
    )  # fmt: skip


def line(*manifests: Manifest | None) -> dict[int, Manifest]:
    return {item.version: item for item in manifests if item is not None}


def recounted(contributor: Contributor, line: dict[int, Manifest]) -> list[tuple[bytes, bool]]:
    return [(update.digest, update.contained) for update in contributor.recount(line)]


def test_a_header_describes_its_payload(contributor: Contributor, run: RunSpec) -> None:
    submission = send(contributor)
    header = submission.header
    assert (header.run, header.group, header.round) == (run.run_id, "block-0", 7)
    assert (header.base, header.base_digest) == (BASE.version, BASE.digest)
    assert (header.steps, header.tokens, header.elements, header.dtype) == (5, 80, 2, "fp16")
    assert header.norm == pytest.approx(5**0.5)
    assert header.digest == payload_digest(submission.payload)
    assert decode_vector(submission.payload, "fp16").tolist() == [1.0, -2.0]


def test_a_contained_update_leaves_nothing(contributor: Contributor) -> None:
    submission = send(contributor)
    assert contributor.settle(line(manifest(submission.header.digest))) is True
    assert contributor.residual.vector.tolist() == [0.0, 0.0]
    assert contributor.settle(line(manifest(submission.header.digest))) is None


def test_an_update_beside_the_named_ones_is_contained_too(contributor: Contributor) -> None:
    digest = send(contributor).header.digest
    crowded = manifest(b"x" * 32).model_copy(update={"also": bytes(8) + digest[:8]})
    assert crowded.accepted == 3
    assert contributor.settle(line(crowded)) is True
    assert contributor.residual.vector.tolist() == [0.0, 0.0]
    send(contributor)
    shifted = crowded.model_copy(update={"also": bytes(4) + digest[:8] + bytes(4)})
    assert contributor.settle(line(shifted)) is False


@pytest.mark.parametrize(
    "newest",
    [
        None,  # the aggregator died and the version stands
        manifest(b"x" * 32),  # another fork won, without this update
        manifest(b"x" * 32, version=4),  # still the version it was trained from
    ],
)
def test_an_update_that_no_manifest_contains_goes_with_the_next(
    contributor: Contributor, newest: Manifest | None
) -> None:
    contributor.answered(receipt(send(contributor), Verdict.ACCEPTED))
    assert contributor.settle(line(newest)) is False
    later = send(contributor, ZERO, round=8)
    assert decode_vector(later.payload, "fp16").tolist() == [0.5, -1.0]


def test_a_manifest_that_names_an_update_as_late_does_not_contain_it(contributor: Contributor) -> None:
    submission = send(contributor)
    assert contributor.settle(line(manifest(submission.header.digest, verdict=Verdict.LATE))) is False
    assert contributor.residual.vector.tolist() == [0.5, -1.0]


@pytest.mark.parametrize(("verdict", "contained"), [(Verdict.ACCEPTED, True), (Verdict.LATE, False)])
def test_the_receipt_decides_where_a_version_was_missed(
    contributor: Contributor, verdict: Verdict, contained: bool
) -> None:
    contributor.answered(receipt(send(contributor), verdict))
    assert contributor.settle(line(manifest(b"x" * 32, version=6))) is contained


def test_a_manifest_that_was_missed_decides_where_somebody_still_has_it(contributor: Contributor) -> None:
    submission = send(contributor)
    contributor.answered(receipt(submission, Verdict.ACCEPTED))
    assert contributor.versions_wanted == {5}
    # Its aggregator died with it, and the version of the next one is two back by now.
    assert contributor.settle(line(manifest(b"x" * 32), manifest(b"y" * 32, version=6))) is False


@pytest.mark.parametrize("sent_meanwhile", [False, True])
def test_what_a_version_holds_after_all_is_taken_back(contributor: Contributor, sent_meanwhile: bool) -> None:
    submission = send(contributor)
    assert contributor.settle({}) is False, "no version was announced in its round"
    assert contributor.left_over.tolist() == [0.5, -1.0]
    if sent_meanwhile:
        send(contributor, ZERO, round=8)
    late = line(manifest(submission.header.digest))
    assert recounted(contributor, late) == [(submission.header.digest, True)]
    assert recounted(contributor, late) == [], "once"
    assert contributor.left_over.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sent_meanwhile", [False, True])
def test_what_was_in_a_version_that_lost_is_carried_on(
    contributor: Contributor, sent_meanwhile: bool
) -> None:
    submission = send(contributor)
    assert contributor.settle(line(manifest(submission.header.digest))) is True
    carried = [0.5, -1.0]
    if sent_meanwhile:
        send(contributor, UPDATE, round=8)
        carried = [1.0, -2.0]  # half of both, as neither is in a version
    assert recounted(contributor, line(manifest(b"x" * 32))) == [(submission.header.digest, False)]
    assert contributor.left_over.tolist() == carried


def refused(contributor: Contributor, update: Any = UPDATE, round: int = 8) -> Submission:
    submission = send(contributor, update, round)
    contributor.answered(receipt(submission, Verdict.REFUSED, Reason.WORSE))
    assert contributor.settle({}) is False
    return submission


def test_what_was_accepted_before_outlives_the_refusal_of_the_update_that_carries_it(
    contributor: Contributor,
) -> None:
    contributor.answered(receipt(send(contributor), Verdict.ACCEPTED))
    contributor.settle({})  # its aggregator died
    assert contributor.left_over.tolist() == [0.5, -1.0]
    refused(contributor, np.array([8.0, 8.0], np.float32))
    assert contributor.left_over.tolist() == [0.25, -0.5], "without what the refused one added"
    later = send(contributor, ZERO, round=9)
    assert contributor.settle(line(manifest(later.header.digest))) is True
    assert contributor.left_over.tolist() == [0.0, 0.0]


def test_what_spoils_two_updates_in_a_row_is_dropped(contributor: Contributor) -> None:
    send(contributor)
    contributor.settle({})
    refused(contributor, round=8)
    again = Contributor(contributor._run, "block-0", 2, decay=0.5)
    again.resume(contributor.kept())
    refused(again, round=9)
    assert again.left_over.tolist() == [0.0, 0.0]
    send(again, round=10)
    again.settle({})
    refused(again, round=11)
    assert again.left_over.tolist() == [0.25, -0.5], "what came after begins anew"


def test_a_refusal_that_another_outcome_follows_counts_no_more(contributor: Contributor) -> None:
    refused(contributor, round=7)
    send(contributor, round=8)
    contributor.settle({})
    refused(contributor, round=9)
    assert contributor.left_over.tolist() == [0.25, -0.5]


def test_an_update_that_was_dropped_is_not_counted_again(contributor: Contributor) -> None:
    first = send(contributor)
    contributor.settle({})  # carried on, and so in the next ones, which are spoilt
    refused(contributor, ZERO, round=8)
    refused(contributor, ZERO, round=9)
    late = line(manifest(first.header.digest))
    assert recounted(contributor, late)[-1:] == [(first.header.digest, True)]
    assert contributor.left_over.tolist() == [0.0, 0.0], "what was dropped with another is not taken back"


def test_what_lost_before_another_was_dropped_is_carried_on(contributor: Contributor) -> None:
    first = send(contributor)
    contributor.settle(line(manifest(first.header.digest)))
    refused(contributor, ZERO)
    refused(contributor, ZERO, round=9)
    assert recounted(contributor, line(manifest(b"x" * 32))) == [(first.header.digest, False)]
    assert contributor.left_over.tolist() == [0.5, -1.0]


def test_training_begins_with_what_is_left_over_and_the_next_update_holds_it_once(
    contributor: Contributor,
) -> None:
    version = np.array([10.0, 20.0], dtype=np.float32)
    assert contributor.left_over.tolist() == [0.0, 0.0]
    send(contributor)
    contributor.settle({})
    begun = version + contributor.left_over
    assert begun.tolist() == [10.5, 19.0]
    trained = begun + np.float32(0.25)
    later = send(contributor, trained - begun, round=8)
    assert decode_vector(later.payload, "fp16").tolist() == (trained - version).tolist()


def test_a_receipt_of_another_update_is_ignored(contributor: Contributor) -> None:
    first = send(contributor)
    send(contributor, UPDATE * 2, round=8)
    contributor.answered(receipt(first, Verdict.ACCEPTED))
    assert contributor.settle(line(manifest(b"x" * 32, version=6))) is False


def test_an_update_still_open_at_the_next_round_was_not_taken(contributor: Contributor) -> None:
    send(contributor)
    assert decode_vector(send(contributor, ZERO, round=8).payload, "fp16").tolist() == [0.5, -1.0]


@pytest.mark.parametrize(
    ("reason", "left"),
    [
        (Reason.STALE_BASE, [0.5, -1.0]),
        (Reason.NO_ROOM, [0.5, -1.0]),
        (Reason.NOT_FINITE, [0.0, 0.0]),
        (Reason.NORM_TOO_LARGE, [0.0, 0.0]),
        (Reason.DUPLICATE, [0.5, -1.0]),
        (Reason.WORSE, [0.0, 0.0]),
    ],
)
def test_a_refusal_that_would_come_again_drops_the_update(
    contributor: Contributor, reason: Reason, left: list[float]
) -> None:
    contributor.answered(receipt(send(contributor), Verdict.REFUSED, reason))
    assert contributor.settle({}) is False
    assert contributor.residual.vector.tolist() == left


@pytest.mark.parametrize("update", [np.array([1.0, np.nan], np.float32), np.ones(3, np.float32)])
def test_an_unsound_update_is_never_sent(contributor: Contributor, update: Any) -> None:
    with pytest.raises(ValueError, match="2 finite values"):
        send(contributor, update)


# --- int8 -----------------------------------------------------------------------------------------


def in_int8(run: RunSpec, elements: int) -> Contributor:
    coarse = run.model_copy(update={"round": RoundSpec(compression="int8")})
    return Contributor(coarse, "block-0", elements, decay=0.5)


def deliver(contributor: Contributor, update: Vector) -> Vector:
    """Send an update into the next version; what arrived there."""
    submission = send(contributor, update)
    assert submission.header.dtype == "int8"
    assert contributor.settle(line(manifest(submission.header.digest))) is True
    return decode_vector(submission.payload, "int8")


def test_the_rounding_of_int8_stays_and_goes_with_the_next_update(run: RunSpec) -> None:
    contributor = in_int8(run, 3)
    update = np.array([127.0, 3.25, -0.25], dtype=np.float32)
    assert deliver(contributor, update).tolist() == [127.0, 3.0, 0.0]
    assert contributor.residual.vector.tolist() == [0.0, 0.25, -0.25]
    assert contributor.left_over.tolist() == [0.0, 0.25, -0.25]
    assert deliver(contributor, update).tolist() == [127.0, 4.0, 0.0]  # 3.5 to the even neighbour
    assert contributor.residual.vector.tolist() == [0.0, -0.5, -0.5]


def test_what_is_too_small_for_int8_arrives_all_the_same(run: RunSpec) -> None:
    """The first element makes every step 1; the second learns 0.3 a round, which alone rounds to 0."""
    contributor = in_int8(run, 2)
    update = np.array([127.0, 0.3], dtype=np.float32)
    arrived = [deliver(contributor, update)[1] for _ in range(100)]
    assert set(arrived) == {0.0, 1.0}
    assert sum(arrived) == pytest.approx(30.0, abs=0.5)


def test_what_arrives_in_the_long_run_is_what_was_learnt(run: RunSpec) -> None:
    elements, rounds = INT8_ELEMENTS + 500, 60
    contributor, random = in_int8(run, elements), np.random.default_rng(11)
    learnt, arrived, alone = np.zeros((3, elements))
    for _ in range(rounds):
        update = (random.standard_normal(elements) * np.exp(random.normal(0, 1, elements))).astype(np.float32)
        learnt += update
        arrived += deliver(contributor, update)
        alone += deliver(in_int8(run, elements), update)
        blocks = np.split(np.abs(arrived - learnt), [INT8_ELEMENTS])
    largest = [np.abs(part).max() for part in np.split(update, [INT8_ELEMENTS])]
    for error, most in zip(blocks, largest, strict=True):
        assert error.max() < most / 127  # one step of the last round's int8
    assert np.abs(alone - learnt).max() > 3 * np.abs(arrived - learnt).max()
