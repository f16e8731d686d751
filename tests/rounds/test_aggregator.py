"""Workers and candidates against each other, through sealed envelopes, as the node runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from math import sqrt
from typing import IO

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.rounds.aggregator import Aggregator, Desk, Offer
from spheroid_node.rounds.collection import ACCEPTED, LATE, Answer, Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import Submission
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict, WireError
from spheroid_node.wire.messages import Manifest, Receipt
from spheroid_node.wire.signing import peer_id_of_key
from spheroid_node.wire.tensors import Vector, chunks, vector_digest

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([index]) * 32) for index in range(3)]
PEERS = [peer_id_of_key(key) for key in KEYS]
VECTOR: Vector = np.array([10.0, 20.0, 30.0], dtype=np.float32)
BASE = Base.initial(VECTOR)
NOW, DEADLINE = 1075.0, 1078.0


def submission(run: RunSpec, value: float, tokens: int = 80, round: int = 7) -> Submission:
    update = np.full(3, value, dtype=np.float32)
    return Contributor(run, "block-0", 3).prepare(round, BASE, update, 5, tokens, b"n" * 16)


def desk_of(run: RunSpec, round: int = 7) -> tuple[Desk, Aggregator]:
    desk, aggregator = Desk(run), Aggregator(run, "block-0", round, BASE, 3, PEERS, BytesIO)
    desk.open(aggregator)
    return desk, aggregator


def send(desk: Desk, key: Ed25519PrivateKey, update: Submission, now: float = NOW) -> tuple[Offer, Answer]:
    offer = desk.offer(update.header.seal(key), now)
    if offer.answer is not None:
        return offer, offer.answer
    meter = offer.meter()
    for chunk in chunks(update.payload):
        meter.feed(chunk)
    assert meter.complete
    return offer, desk.deliver(offer, meter.facts(), chunks(update.payload), now)


@pytest.mark.parametrize(
    ("rule", "expected"), [("mean", 14.0), ("clipped", 3.375), ("trimmed-mean", 2.5), ("median", 2.5)]
)
def test_the_rule_of_the_run_decides_what_an_outlier_is_worth(
    run: RunSpec, rule: str, expected: float
) -> None:
    """1, 2, 3 and one of 50, whose limit is three times the median of all, 2.5."""
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([index + 1]) * 32) for index in range(4)]
    changed = run.model_copy(
        update={"round": run.round.model_copy(update={"aggregation": rule, "trim": 0.3})}
    )
    aggregator = Aggregator(changed, "block-0", 7, BASE, 3, [peer_id_of_key(key) for key in keys], BytesIO)
    desk = Desk(changed)
    desk.open(aggregator)
    for key, value in zip(keys, (1.0, 2.0, 3.0, 50.0), strict=True):
        assert send(desk, key, submission(changed, value))[1] == ACCEPTED
    made = aggregator.close(VECTOR, rank=0)
    assert made is not None
    np.testing.assert_allclose(made.vector - VECTOR, expected, rtol=1e-5)


def test_an_update_is_clipped_as_it_comes_where_norms_are_known(run: RunSpec) -> None:
    changed = run.model_copy(update={"round": run.round.model_copy(update={"aggregation": "clipped"})})
    base = replace(BASE, norms=(sqrt(3.0),) * 5)  # of updates of 1
    aggregator = Aggregator(changed, "block-0", 7, base, 3, [peer_id_of_key(KEYS[0])], _nowhere)
    desk = Desk(changed)
    desk.open(aggregator)
    assert send(desk, KEYS[0], submission(changed, 50.0))[1] == ACCEPTED
    made = aggregator.close(VECTOR, rank=0)
    assert made is not None
    np.testing.assert_allclose(made.vector - VECTOR, 3.0, rtol=1e-5)


def _nowhere() -> IO[bytes]:
    raise AssertionError("nothing has to be kept")


def test_a_round_ends_in_the_weighted_mean_and_its_manifest(run: RunSpec) -> None:
    desk, aggregator = desk_of(run)
    updates = [submission(run, 1.0, 80), submission(run, 3.0, 40), submission(run, 9.0, 80)]
    assert send(desk, KEYS[0], updates[0])[1] == ACCEPTED
    assert send(desk, KEYS[1], updates[1])[1] == ACCEPTED
    assert send(desk, KEYS[2], updates[2], DEADLINE)[1] == LATE
    assert aggregator.collection.is_over(NOW)

    made = aggregator.close(VECTOR, rank=1)
    assert made is not None
    np.testing.assert_allclose(made.vector, VECTOR + 5 / 3, rtol=1e-6)
    manifest = made.manifest
    assert Manifest.unseal(manifest.seal(KEYS[1])) == (PEERS[1], manifest)
    assert (manifest.round, manifest.version, manifest.rank, manifest.steps) == (7, 1, 1, 5)
    assert manifest.parent == vector_digest(VECTOR)
    assert manifest.digest == vector_digest(made.vector)
    assert {o.peer: o.verdict for o in manifest.updates} == {
        PEERS[0]: Verdict.ACCEPTED, PEERS[1]: Verdict.ACCEPTED, PEERS[2]: Verdict.LATE,
    }  # fmt: skip


def test_with_nothing_accepted_the_version_stands(run: RunSpec) -> None:
    desk, aggregator = desk_of(run)
    send(desk, KEYS[0], submission(run, 1.0), DEADLINE)
    assert aggregator.close(VECTOR, rank=0) is None


def test_a_repeated_update_is_added_once(run: RunSpec) -> None:
    desk, aggregator = desk_of(run)
    one, other = submission(run, 1.0), submission(run, 2.0)
    twice = [desk.offer(one.header.seal(KEYS[0]), NOW) for _ in range(2)]
    for offer in twice:
        meter = offer.meter()
        meter.feed(one.payload)
        assert desk.deliver(offer, meter.facts(), chunks(one.payload), NOW) == ACCEPTED
    send(desk, KEYS[1], other)
    made = aggregator.close(VECTOR, rank=0)
    assert made is not None
    np.testing.assert_allclose(made.vector, VECTOR + 1.5)


def test_a_payload_that_cannot_be_read_again_leaves_no_trace(run: RunSpec) -> None:
    def torn() -> Iterator[bytes]:
        raise OSError("disk")
        yield b""

    desk, aggregator = desk_of(run)
    one = submission(run, 1.0)
    offer = desk.offer(one.header.seal(KEYS[0]), NOW)
    meter = offer.meter()
    meter.feed(one.payload)
    with pytest.raises(OSError, match="disk"):
        desk.deliver(offer, meter.facts(), torn(), NOW)
    assert aggregator.collection.outcomes() == []
    assert send(desk, KEYS[0], one)[1] == ACCEPTED


def test_a_receipt_names_the_update_and_the_answer(run: RunSpec) -> None:
    desk, _ = desk_of(run)
    update = submission(run, 1.0)
    offer, answer = send(desk, KEYS[0], update, DEADLINE)
    receipt = offer.receipt(answer)
    assert Receipt.unseal(receipt.seal(KEYS[1])) == (PEERS[1], receipt)
    assert (receipt.update, receipt.verdict) == (update.header.digest, Verdict.LATE)
    assert receipt.reason is Reason.AFTER_DEADLINE


def test_a_forged_header_is_not_judged_at_all(run: RunSpec) -> None:
    desk, _ = desk_of(run)
    envelope = bytearray(submission(run, 1.0).header.seal(KEYS[0]))
    envelope[-1] ^= 1
    with pytest.raises(WireError, match="not-authentic"):
        desk.offer(bytes(envelope), NOW)


def test_a_desk_refuses_groups_that_it_does_not_hold(run: RunSpec) -> None:
    desk = Desk(run)
    header = submission(run, 1.0).header
    assert desk.offer(header.seal(KEYS[0]), NOW).answer == Answer(Verdict.REFUSED, Reason.WRONG_GROUP)
    foreign = header.model_copy(update={"run": "f" * 16})
    assert desk.offer(foreign.seal(KEYS[0]), NOW).answer == Answer(Verdict.REFUSED, Reason.WRONG_RUN)


def test_a_payload_whose_round_made_way_for_the_next_is_late(run: RunSpec) -> None:
    desk, first = desk_of(run)
    update = submission(run, 1.0)
    offer = desk.offer(update.header.seal(KEYS[0]), NOW)
    meter = offer.meter()
    meter.feed(update.payload)
    following = Aggregator(run, "block-0", 8, BASE, 3, PEERS, BytesIO)
    desk.open(following)
    assert desk.deliver(offer, meter.facts(), chunks(update.payload), NOW) == LATE
    assert first.close(VECTOR, 0) is None
    assert desk.aggregator("block-0") is following
    assert desk.aggregator("interface") is None
