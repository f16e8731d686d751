"""The round without the learning: updates of a few numbers, everything else as ever.

Headers are signed, offered and judged, receipts and manifests made by the code that nodes run. Only what
goes into an update is made up, and its size on the links is that of the run's real one.
"""

from __future__ import annotations

from math import ceil, nan

import numpy as np
from torch import Tensor

from spheroid_node.model.randomness import stream
from spheroid_node.run import LearningSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.training.local import TrainOutcome
from spheroid_node.wire.tensors import Vector

ELEMENTS = 16
"""Of every update and version."""

REPLICAS = 50
"""Most workers a block of :func:`wide_run`: one peer leads so many with ease."""


def vector() -> Vector:
    """Version 0 of every group: float32 [ELEMENTS]."""
    return np.zeros(ELEMENTS, dtype=np.float32)


class DryLearner:
    """In the place of a trainer: its updates are noise, and cost no time to make."""

    def __init__(self, run: RunSpec, seed: int, index: int) -> None:
        self._run, self._seed, self._index = run, seed, index
        self._rounds = 0
        self._update = vector()

    def load(
        self,
        group: str,
        version: int,
        steps: int,
        vector: Vector,
        left_over: Vector | None = None,
        carry: bool = False,
    ) -> None:
        """Nothing that is learnt here depends on a version."""

    def reset_moments(self) -> None:
        """There are none."""

    def train(self, max_steps: int) -> TrainOutcome:
        self._rounds += 1
        source = stream(self._seed, 4, self._index, self._rounds)
        self._update = source.standard_normal(ELEMENTS, dtype=np.float32)
        training, window = self._run.training, self._run.model.window
        tokens = max_steps * training.batch * window
        return TrainOutcome(
            steps=max_steps, tokens=tokens, seconds=0.0, loss=nan, step_seconds=0.0, upstream_seconds=0.0
        )

    def is_at(self, group: str, version: int) -> bool:
        """Never: there is no model to try an update on."""
        return False

    def screen(self, group: str, update: Vector, windows: Tensor) -> float | None:
        return None

    def take(self, group: str) -> Vector:
        """float32 [ELEMENTS], the same for all groups."""
        return self._update


def wide_run(workers: int) -> RunSpec:
    """A run for a swarm of any size: so many blocks that each has at most 50 workers, and three at least.

    Every block is about 800 thousand parameters. The interface is frozen and no block reads the one before
    it: both would bring all workers to one peer.
    """
    return _run("wide", max(3, ceil(workers / REPLICAS)), shards=1)


def crowded_run(blocks: int, shards: int) -> RunSpec:
    """As :func:`wide_run`, but with so few blocks that each has many replicas, and may be cut into shards."""
    return _run("crowded", blocks, shards)


def _run(name: str, blocks: int, shards: int) -> RunSpec:
    return RunSpec(
        name=name,
        model=ModelSpec(blocks=blocks, layers=4, width=128, heads=4, window=128),
        learning=LearningSpec(conditioning="context"),
        training=TrainingSpec(local_steps=40),
        round=RoundSpec(period=60.0, settle=8.0, shards=shards),
        interface="frozen",
    )
