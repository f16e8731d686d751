"""The parameters of a group as one vector, and back: what is averaged, hashed and sent.

A block or the interface is one group, or several where the run cuts it into shards: then the vector of each
is a part of the whole's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spheroid_node.model.block import Block
from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.model.interface import Interface
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group, whole_of

Vector = NDArray[np.float32]


def build_group(run: RunSpec, group: str) -> nn.Module:
    """A fresh module of a block or the interface. Raises :class:`ValueError` for one that the run lacks."""
    if group == INTERFACE_GROUP:
        return Interface(run.model)
    for block in range(run.model.blocks):
        if group == block_group(block):
            return Block(run, block)
    raise ValueError(f"run {run.name} has no group {group!r}")


def group_module(model: ComposedModel | Hop, group: str) -> nn.Module:
    """The block or interface of ``model`` with this name. Raises :class:`ValueError` if it is not there."""
    if group == INTERFACE_GROUP:
        return model.interface
    if isinstance(model, Hop) and group == block_group(model.index):
        return model.block
    if isinstance(model, ComposedModel):
        for index, block in enumerate(model.blocks):
            if group == block_group(index):
                return block
    raise ValueError(f"the model does not hold the group {group!r}")


def shapes(run: RunSpec, group: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a block or of the interface, in the order of its vector."""
    return dict(_shapes(run.model_copy(), group))


@lru_cache(maxsize=256)
def _shapes(run: RunSpec, group: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    with torch.device("meta"):
        module = build_group(run, group)
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def part_of_whole(run: RunSpec, group: str) -> slice:
    """Where the parameters of ``group`` are in the vector of its block, or of the interface; a whole is all.

    S shards of n parameters have n / S each, rounded up or down. Raises :class:`ValueError` for a group that
    the run does not have.
    """
    whole = whole_of(group)
    names = (whole,) if group == whole else run.shards_of(whole)
    if group not in names:
        raise ValueError(f"run {run.name} has no group {group!r}")
    number, total = names.index(group), sum(int(np.prod(shape)) for shape in shapes(run, whole).values())
    return slice(total * number // len(names), total * (number + 1) // len(names))


def elements(run: RunSpec, group: str) -> int:
    """Parameters of ``group``."""
    part = part_of_whole(run, group)
    return int(part.stop - part.start)


def joined(run: RunSpec, vectors: Mapping[str, Vector]) -> dict[str, Vector]:
    """Vectors of groups, by name, as those of whole blocks and of the interface."""
    wholes = dict.fromkeys(map(whole_of, vectors))
    return {whole: join([vectors[group] for group in run.shards_of(whole)]) for whole in wholes}


def join(shards: Sequence[Vector]) -> Vector:
    """The vector of a whole from those of its shards; a single one is it."""
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


def flatten(module: nn.Module, part: slice | None = None) -> Vector:
    """A copy of all parameters, or of a part, in the order of ``named_parameters``: [elements], float32."""
    return np.concatenate(
        [values.detach().float().cpu().numpy() for values, _ in _within(module, part)]
    ).astype(np.float32, copy=False)


@torch.no_grad()
def unflatten_(module: nn.Module, vector: Vector, part: slice | None = None) -> None:
    """Set all parameters, or a part, from ``vector``. Raises :class:`ValueError` for another length."""
    places = _within(module, part)
    size = sum(len(values) for values, _ in places)
    if vector.shape != (size,):
        raise ValueError(f"a vector of shape {vector.shape} for {size} parameters")
    for values, place in places:
        values.copy_(torch.from_numpy(np.array(vector[place], dtype=np.float32)))


def _within(module: nn.Module, part: slice | None) -> list[tuple[Tensor, slice]]:
    """Views [size] of what lies in ``part`` of a module's vector, and where in that part each lies."""
    ends = np.cumsum([0, *(parameter.numel() for parameter in module.parameters())]).tolist()
    part = slice(0, ends[-1]) if part is None else part
    found = []
    for parameter, (start, end) in zip(module.parameters(), pairwise(ends), strict=True):
        first, last = max(start, part.start), min(end, part.stop)
        if first < last:
            place = slice(first - part.start, last - part.start)
            found.append((parameter.view(-1)[first - start : last - start], place))
    return found


def named_tensors(run: RunSpec, group: str, vector: Vector) -> dict[str, Vector]:
    """The parameters in ``vector`` by name, as a checkpoint stores them; those of a shard under its name."""
    if vector.shape != (elements(run, group),):
        raise ValueError(f"a vector of shape {vector.shape} for {elements(run, group)} parameters of {group}")
    if group != whole_of(group):
        return {group: vector}
    tensors, start = {}, 0
    for name, shape in shapes(run, group).items():
        size = int(np.prod(shape))
        tensors[name] = vector[start : start + size].reshape(shape)
        start += size
    return tensors


def vector_of(run: RunSpec, group: str, tensors: dict[str, Vector]) -> Vector:
    """Inverse of :func:`named_tensors`. Raises :class:`ValueError` for a missing name or another shape."""
    parts = []
    sharded = group != whole_of(group)
    wanted = {group: (elements(run, group),)} if sharded else shapes(run, group)
    for name, shape in wanted.items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            raise ValueError(f"{group} needs a tensor {name} of shape {shape}")
        parts.append(np.asarray(tensor, dtype=np.float32).ravel())
    return np.concatenate(parts)
