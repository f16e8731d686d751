"""The outer step: what the mean update of a round makes of a version (design.md, section 4).

A version travels as its payload: its parameters and, with ``nesterov``, as many values of momentum after
them. Each round has another aggregator, so what the next step needs must go wherever the version goes.
"""

from __future__ import annotations

import numpy as np

from spheroid_node.run import TrainingSpec
from spheroid_node.wire.tensors import Vector


def payload_elements(training: TrainingSpec, elements: int) -> int:
    """Values of the payload of a version with so many parameters."""
    return elements * (2 if training.outer == "nesterov" else 1)


def first_payload(training: TrainingSpec, parameters: Vector) -> Vector:
    """Payload of version 0: without momentum yet."""
    more = payload_elements(training, len(parameters)) - len(parameters)
    return np.concatenate([parameters, np.zeros(more, dtype=np.float32)]) if more else parameters


def next_payload(training: TrainingSpec, base: Vector, mean_update: Vector) -> Vector:
    """Payload of the version that ``mean_update`` makes of ``base``, a payload; float32, and new.

    It may take the place of ``mean_update`` in memory.

    ``average`` adds the update. ``nesterov`` takes it for the negative gradient of a step of SGD with
    Nesterov momentum, as in DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) and in the form
    that torch.optim.SGD has: v ← μ·v + Δ, θ ← θ + η·(Δ + μ·v) for the mean update Δ.
    """
    if training.outer == "average":
        mean_update += base
        return mean_update
    parameters, momentum = np.split(base, [len(mean_update)])
    momentum = mean_update + training.outer_momentum * momentum
    step = mean_update + training.outer_momentum * momentum
    stepped = parameters + training.outer_rate * step
    return np.concatenate([stepped, momentum]).astype(np.float32, copy=False)
