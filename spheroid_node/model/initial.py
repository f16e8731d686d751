"""Version 0 of every group, from the run's seed alone: the same bytes on every machine."""

from __future__ import annotations

import math

import numpy as np

from spheroid_node.model.parameters import Vector, shapes
from spheroid_node.model.randomness import stream
from spheroid_node.run import RunSpec

EMBEDDING_SCALE = 1.0
"""Standard deviation of embeddings: like that of the normalised upstream state beside them."""


def initial_vector(run: RunSpec, group: str) -> Vector:
    """Parameters of ``group`` at version 0: shape [elements], float32.

    Matrices are normal with variance 1/fan-in, those that write to the residual stream divided by the depth
    of a block; head (unless it is frozen) and noise modulation are zero, norms one.
    """
    index = (*(f"block-{block}" for block in range(run.model.blocks)), "interface").index(group)
    parts = []
    for number, (name, shape) in enumerate(shapes(run, group).items()):
        if name.endswith("norm.weight"):
            parts.append(np.ones(shape, np.float32))
        elif _begins_at_zero(run, name):
            parts.append(np.zeros(shape, np.float32))
        else:
            normal = stream(run.seed, index, number).standard_normal(shape, dtype=np.float32)
            parts.append(normal * np.float32(_deviation(run, name, shape)))
    return np.concatenate([part.ravel() for part in parts])


def _begins_at_zero(run: RunSpec, name: str) -> bool:
    # A frozen head of zeros would pass no gradient to the blocks, ever.
    head = name == "head.weight" and run.interface != "frozen"
    return head or name.startswith("modulation.out") or name.endswith(".bias")


def _deviation(run: RunSpec, name: str, shape: tuple[int, ...]) -> float:
    if name == "embedding.weight":
        return EMBEDDING_SCALE
    writes_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
    return 1 / math.sqrt(shape[1] * (2 * run.model.layers if writes_residual else 1))
