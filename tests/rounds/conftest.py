"""A tiny run, and updates of it that an aggregator has no reason to refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spheroid_node.rounds.aggregation import PayloadFacts, payload_facts
from spheroid_node.rounds.collection import Base, Collection
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.wire.messages import UpdateHeader
from spheroid_node.wire.tensors import Vector, chunks, encode_vector, payload_digest

ELEMENTS = 6
BASE = Base(version=4, digest=b"b" * 32, steps=100, norms=(1.0, 2.0, 3.0))
ROUND = 7


@pytest.fixture
def run() -> RunSpec:
    """Rounds of 10 s, τ after 8 s; 5 steps of 2 windows of 8 bytes: at most 80 bytes a round."""
    return RunSpec(
        name="tiny",
        model=ModelSpec(blocks=2, layers=1, width=16, heads=2, window=8),
        training=TrainingSpec(local_steps=5, batch=2),
        round=RoundSpec(genesis=1000.0, period=10.0, settle=2.0, max_update_norm=100.0, screen=0.1),
    )


@dataclass(frozen=True)
class Parcel:
    """A header and its payload."""

    header: UpdateHeader
    payload: bytes

    @property
    def facts(self) -> PayloadFacts:
        return payload_facts(chunks(self.payload), self.header.dtype)


@pytest.fixture
def parcel(run: RunSpec) -> Callable[..., Parcel]:
    """Makes an acceptable update of ``values``; keywords change single fields of its header."""

    def make(values: Any = 1.0, **changes: Any) -> Parcel:
        vector: Vector = np.full(ELEMENTS, 0, dtype=np.float32) + np.asarray(values, dtype=np.float32)
        payload = encode_vector(vector, changes.get("dtype", "fp16"))
        fields: dict[str, Any] = {
            "run": run.run_id,
            "group": "block-0",
            "round": ROUND,
            "base": BASE.version,
            "base_digest": BASE.digest,
            "nonce": b"n" * 16,
            "steps": 5,
            "tokens": 80,
            "norm": 1.0,
            "dtype": "fp16",
            "elements": ELEMENTS,
            "digest": payload_digest(payload),
        }
        return Parcel(UpdateHeader(**(fields | changes)), payload)

    return make


@pytest.fixture
def collect(run: RunSpec) -> Callable[..., Collection]:
    """A collection of block-0 in round 7 (τ at 1078) that expects the peers named."""

    def make(*expected: str, run: RunSpec = run) -> Collection:
        return Collection(run, "block-0", ROUND, BASE, ELEMENTS, expected)

    return make
