"""A whole round whose updates travel as int8: two workers, their aggregator, and what is left over."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.rounds.aggregator import Aggregator, Desk
from spheroid_node.rounds.collection import ACCEPTED, Answer, Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import Submission
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.signing import peer_id_of_key
from spheroid_node.wire.tensors import (
    INT8_ELEMENTS,
    Vector,
    chunks,
    decode_vector,
    encoded_size,
    payload_digest,
)

ELEMENTS = INT8_ELEMENTS + 100
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([index]) * 32) for index in range(2)]
NOW = 1075.0


@pytest.fixture
def coarse(run: RunSpec) -> RunSpec:
    return run.model_copy(update={"round": run.round.model_copy(update={"compression": "int8"})})


def learnt(seed: int) -> Vector:
    """About 50 long; the run's limit is 100."""
    return np.random.default_rng(seed).normal(0, 50 / ELEMENTS**0.5, ELEMENTS).astype(np.float32)


class Round:
    """Round 7 of a run's first block, for the workers of KEYS."""

    def __init__(self, run: RunSpec, vector: Vector) -> None:
        self.base = Base.initial(vector)
        peers = [peer_id_of_key(key) for key in KEYS]
        self.aggregator = Aggregator(run, "block-0", 7, self.base, len(vector), peers, BytesIO)
        self.desk = Desk(run)
        self.desk.open(self.aggregator)

    def submission(self, contributor: Contributor, update: Vector, tokens: int = 80) -> Submission:
        return contributor.prepare(7, self.base, update, 5, tokens, b"n" * 16)

    def send(self, key: Ed25519PrivateKey, submission: Submission) -> Answer:
        offer = self.desk.offer(submission.header.seal(key), NOW)
        if offer.answer is not None:
            return offer.answer
        meter = offer.meter()
        for chunk in chunks(submission.payload):
            meter.feed(chunk)
        assert meter.complete
        return self.desk.deliver(offer, meter.facts(), chunks(submission.payload), NOW)


def test_a_round_of_two_workers(coarse: RunSpec) -> None:
    vector = np.linspace(-1, 1, ELEMENTS, dtype=np.float32)
    round = Round(coarse, vector)
    contributors = [Contributor(coarse, "block-0", ELEMENTS) for _ in KEYS]
    updates = [learnt(1), learnt(2)]
    sent = [
        round.submission(contributor, update, tokens)
        for contributor, update, tokens in zip(contributors, updates, (80, 40), strict=True)
    ]
    for key, submission in zip(KEYS, sent, strict=True):
        assert len(submission.payload) == encoded_size(ELEMENTS, "int8") == ELEMENTS + 8
        assert round.send(key, submission) == ACCEPTED
    made = round.aggregator.close(vector, rank=0)
    assert made is not None

    arrived = [decode_vector(submission.payload, "int8") for submission in sent]
    np.testing.assert_allclose(made.vector, vector + (2 * arrived[0] + arrived[1]) / 3, atol=1e-6)
    measured = sorted(update.norm for update in made.manifest.updates)
    assert measured == pytest.approx(sorted(float(np.linalg.norm(update)) for update in arrived))
    for contributor, update, delivered in zip(contributors, updates, arrived, strict=True):
        assert contributor.settle({made.manifest.version: made.manifest}) is True
        np.testing.assert_array_equal(contributor.residual.vector, update - delivered)
        assert 0 < np.abs(contributor.residual.vector).max() <= np.abs(update).max() / 127 * 0.5001


def outlier(tail: float) -> Vector:
    """One element of 63.5, which makes the step 0.5, and a tail."""
    vector = np.full(ELEMENTS, tail, dtype=np.float32)
    vector[0], vector[INT8_ELEMENTS:] = 63.5, 0.0
    return vector


@pytest.mark.parametrize(("tail", "longer"), [(0.26, True), (0.24, False)])
def test_the_norm_of_the_payload_counts_not_that_before_rounding(
    coarse: RunSpec, tail: float, longer: bool
) -> None:
    """A tail of 0.26 rounds up to 0.5 and makes the update longer, one of 0.24 rounds away."""
    round = Round(coarse, np.zeros(ELEMENTS, dtype=np.float32))
    submission = round.submission(Contributor(coarse, "block-0", ELEMENTS), outlier(tail))
    assert round.send(KEYS[0], submission) == ACCEPTED
    (outcome,) = round.aggregator.collection.outcomes()
    assert (outcome.norm > submission.header.norm * 1.05) is longer
    assert outcome.norm == pytest.approx((63.5**2 + longer * 0.25 * (INT8_ELEMENTS - 1)) ** 0.5)


def test_the_limit_holds_for_the_payload_too(coarse: RunSpec) -> None:
    tight = coarse.model_copy(update={"round": coarse.round.model_copy(update={"max_update_norm": 68.0})})
    round = Round(tight, np.zeros(ELEMENTS, dtype=np.float32))
    submission = round.submission(Contributor(tight, "block-0", ELEMENTS), outlier(0.26))
    assert submission.header.norm < 68.0
    assert round.send(KEYS[0], submission) == Answer(Verdict.REFUSED, Reason.NORM_TOO_LARGE)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_means_nothing_is_refused_and_leaves_no_trace(coarse: RunSpec, scale: float) -> None:
    vector = np.zeros(ELEMENTS, dtype=np.float32)
    round = Round(coarse, vector)
    good = round.submission(Contributor(coarse, "block-0", ELEMENTS), learnt(3))
    payload = bytearray(good.payload)
    payload[4100:4104] = np.array([scale], dtype="<f4").tobytes()
    header = good.header.model_copy(update={"digest": payload_digest(bytes(payload))})
    hostile = Submission(header, bytes(payload))
    assert round.send(KEYS[0], hostile) == Answer(Verdict.REFUSED, Reason.NOT_FINITE)
    assert round.send(KEYS[1], good) == ACCEPTED
    made = round.aggregator.close(vector, rank=0)
    assert made is not None
    np.testing.assert_allclose(made.vector, decode_vector(good.payload, "int8"), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["fp16", "float32"])
def test_another_compression_is_refused_by_its_header(coarse: RunSpec, dtype: str) -> None:
    round = Round(coarse, np.zeros(ELEMENTS, dtype=np.float32))
    submission = round.submission(Contributor(coarse, "block-0", ELEMENTS), learnt(4))
    other = Submission(submission.header.model_copy(update={"dtype": dtype}), submission.payload)
    assert round.send(KEYS[0], other) == Answer(Verdict.REFUSED, Reason.BAD_DTYPE)
