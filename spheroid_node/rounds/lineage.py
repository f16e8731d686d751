"""What a version and the one that it was made from have to do with each other."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import numpy as np

from spheroid_node.run import RunSpec, TrainingSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest
from spheroid_node.wire.tensors import Vector

SLACK = 1.01
ROUNDING = 1e-6
"""Of the length of the parameters: what adding to them in float32 may be off by."""


def follows(child: Manifest, parent: Manifest | None, run: RunSpec) -> bool:
    """Whether what ``child`` says can be true if it was made from ``parent``; None is version 0.

    Who has version 0 compares its digest with the parent's that a version 1 names.
    """
    version, round, steps, total = (
        (0, -1, 0, 0) if parent is None else (parent.version, parent.round, parent.steps, parent.total)
    )
    return (
        child.version == version + 1
        and (parent is None or child.parent == parent.digest)
        and child.round > round
        and child.total == total + child.accepted
        and 0 <= child.steps - steps <= run.training.local_steps
    )


def longest_update(manifest: Manifest, run: RunSpec) -> float:
    """The most that the mean update behind a version can measure (L2), by the norms that it names.

    A mean is no longer than the longest of what it is made of. A median or a trimmed mean is no larger than
    the largest, value by value.
    """
    if manifest.also:
        longest = run.round.max_update_norm
    else:
        longest = max(update.norm for update in manifest.updates if update.verdict is Verdict.ACCEPTED)
    by_value = run.round.aggregation in ("median", "trimmed-mean")
    return longest * (sqrt(manifest.accepted) if by_value else 1.0)


def is_within_reach(
    training: TrainingSpec, base: Vector, payload: Vector, elements: int, longest: Iterable[float]
) -> bool:
    """Whether mean updates of at most these norms, one a round, can lead from one payload to another.

    By the formulas of rounds/outer.py and the triangle inequality. ``elements``: of the parameters.
    """
    is_nesterov = training.outer == "nesterov"
    rate, decay = (training.outer_rate, training.outer_momentum) if is_nesterov else (1.0, 0.0)
    momentum, reach = _norm(base[elements:]), 0.0
    for norm in longest:
        momentum = decay * momentum + norm
        reach += rate * (norm + decay * momentum)
    rounding = ROUNDING * _norm(base)
    return (
        _norm(payload[:elements] - base[:elements]) <= SLACK * reach + rounding
        and _norm(payload[elements:]) <= SLACK * momentum + rounding
    )


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector)) if len(vector) else 0.0
