"""A run small enough to learn something in a second, and text for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from spheroid_node.run import LearningSpec, ModelSpec, RunSpec, TrainingSpec
from spheroid_node.training.text import Text

torch.set_num_threads(1)

WORDS = "the of and a castle stands on hill above river where old road turns north to sea"


def sentences(seed: int, count: int) -> bytes:
    """Sentences of a few words, drawn by ``seed``: the same on every machine."""
    words = WORDS.split()
    generator = np.random.Generator(np.random.PCG64(seed))
    lines = (" ".join(words[i] for i in generator.integers(len(words), size=8)) for _ in range(count))
    return "".join(f"{line}.\n" for line in lines).encode()


@pytest.fixture
def make_run() -> Callable[..., RunSpec]:
    """A run of width 32, one layer a block and window 32; keywords change its learning and training."""

    def make(
        *,
        blocks: int = 2,
        interface: str = "shared",
        training: dict[str, object] | None = None,
        **learning: object,
    ) -> RunSpec:
        settings = {"batch": 8, "learning_rate": 1e-2, "warmup_steps": 5, **(training or {})}
        return RunSpec(
            name="tiny",
            model=ModelSpec(blocks=blocks, layers=1, width=32, heads=2, window=32),
            learning=LearningSpec.model_validate(learning),
            training=TrainingSpec.model_validate(settings),
            interface="frozen" if interface == "frozen" else "shared",
        )

    return make


@pytest.fixture
def run(make_run: Callable[..., RunSpec]) -> RunSpec:
    return make_run()


@pytest.fixture
def text() -> Text:
    train, held_out = sentences(0, 400), sentences(1, 60)
    return Text(
        name="sentences",
        train=np.frombuffer(train, dtype=np.uint8),
        held_out=np.frombuffer(held_out, dtype=np.uint8),
        sha256="",
    )
