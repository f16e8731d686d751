"""Workers that mean harm: what they hand in instead of what they learnt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spheroid_node.model.randomness import stream
from spheroid_node.rounds.ledger import Submission
from spheroid_node.wire.messages import UpdateHeader
from spheroid_node.wire.tensors import Vector, decode_vector, encode_vector, payload_digest

SCALE = 100.0

Forgery = Callable[[Vector, np.random.Generator], Vector]


def _flipped(update: Vector, _rng: np.random.Generator) -> Vector:
    return -update


def _scaled(update: Vector, _rng: np.random.Generator) -> Vector:
    return np.float32(SCALE) * update


def _random(update: Vector, rng: np.random.Generator) -> Vector:
    """As long as the real one."""
    noise = rng.standard_normal(len(update), dtype=np.float32)
    return np.float32(float(np.linalg.norm(update)) / float(np.linalg.norm(noise))) * noise


def _nan(update: Vector, _rng: np.random.Generator) -> Vector:
    return np.full_like(update, np.nan)


def _unchanged(update: Vector, _rng: np.random.Generator) -> Vector:
    return update


ATTACKS: dict[str, Forgery] = {
    "flipped": _flipped,
    "scaled": _scaled,
    "random": _random,
    "nan": _nan,
    "stale": _unchanged,
}
"""What becomes of the update; ``stale`` says that it was trained from a version that is gone."""


def forged(submission: Submission, attack: str, seed: int, index: int) -> Submission:
    """What worker ``index`` hands in in place of ``submission``, with a header that is right about it."""
    header = submission.header
    rng = stream(seed, 3, index, header.round)
    update = ATTACKS[attack](decode_vector(submission.payload, header.dtype), rng)
    payload = encode_vector(update, header.dtype)
    norm = float(np.linalg.norm(update.astype(np.float64)))
    changes: dict[str, object] = {"digest": payload_digest(payload)}
    changes["norm"] = norm if np.isfinite(norm) else header.norm
    if attack == "stale":
        changes["base"] = max(0, header.base - 2)
    return Submission(UpdateHeader.model_validate(header.fields() | changes), payload)
