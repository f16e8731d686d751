"""Version 0 of every group, from the run's seed alone: the same bytes on every machine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spheroid_node.model.parameters import Vector, part_of_whole, shapes
from spheroid_node.model.randomness import stream
from spheroid_node.run import RunSpec, whole_of

EMBEDDING_SCALE = 1.0
"""Standard deviation of embeddings: like that of the normalised upstream state beside them."""


def initial_vector(run: RunSpec, group: str) -> Vector:
    """Parameters of ``group`` at version 0, a part of those of its whole: shape [elements], float32.

    Matrices are normal with variance 1/fan-in, those that write to the residual stream divided by the depth
    of a block; head (unless it is frozen) and noise modulation are zero, norms one. Kernels of the ``mlp``
    mixer are normal over the first 1, 2, 4, … distances, with variance 1/reach, and zero beyond.
    """
    whole, part = whole_of(group), part_of_whole(run, group)
    index = (*(f"block-{block}" for block in range(run.model.blocks)), "interface").index(whole)
    parts, place = [], 0
    for number, (name, shape) in enumerate(shapes(run, whole).items()):
        size = math.prod(shape)
        first, last = max(part.start - place, 0), min(part.stop - place, size)
        if first < last:
            parts.append(_initial_values(run, index, number, name, shape).ravel()[first:last])
        place += size
    return np.concatenate(parts)


def _initial_values(
    run: RunSpec, index: int, number: int, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Of parameter ``number`` of the group with this ``index``."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if _begins_at_zero(run, name):
        return np.zeros(shape, np.float32)
    normal = stream(run.seed, index, number).standard_normal(shape, dtype=np.float32)
    return normal * _deviation(run, name, shape)


def _begins_at_zero(run: RunSpec, name: str) -> bool:
    # A frozen head of zeros would pass no gradient to the blocks, ever.
    head = name == "head.weight" and run.interface != "frozen"
    return head or name.startswith("modulation.out") or name.endswith(".bias")


def _deviation(run: RunSpec, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard deviation of each element, or of all of them."""
    if name == "embedding.weight":
        return np.asarray(EMBEDDING_SCALE, np.float32)
    if name.endswith("mixing.kernels"):
        return _kernel_deviation(*shape)
    writes_residual = name.endswith(("attention.out.weight", "mixing.out.weight", "mlp.2.weight"))
    return np.asarray(1 / math.sqrt(shape[1] * (2 * run.model.layers if writes_residual else 1)), np.float32)


def _kernel_deviation(kernels: int, window: int) -> NDArray[np.float32]:
    """[kernels, window]: 1/√reach up to the reach of a kernel, which goes round 1, 2, 4, … and ``window``.

    Kernels that all reached over the whole window would begin with the average of the text, and learn slowly
    what matters most, the last bytes. A step and not a decay, since exp does not round alike everywhere.
    """
    scales = (window - 1).bit_length() + 1
    reach_K1 = np.array([[min(2 ** (kernel % scales), window)] for kernel in range(kernels)])
    return np.where(np.arange(window) < reach_K1, 1 / np.sqrt(reach_K1), 0).astype(np.float32)
