"""The parameters of a group as one vector, and back: what is averaged, hashed and sent."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from spheroid_node.model.block import Block
from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.model.interface import Interface
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group

Vector = NDArray[np.float32]


def build_group(run: RunSpec, group: str) -> nn.Module:
    """A fresh module of ``group``. Raises :class:`ValueError` for a group that the run does not have."""
    if group == INTERFACE_GROUP:
        return Interface(run.model)
    for block in range(run.model.blocks):
        if group == block_group(block):
            return Block(run, block)
    raise ValueError(f"run {run.name} has no group {group!r}")


def group_module(model: ComposedModel | Hop, group: str) -> nn.Module:
    """The part of ``model`` that ``group`` names. Raises :class:`ValueError` if it is not there."""
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
    """Name and shape of every parameter of ``group``, in the order of its vector."""
    return dict(_shapes(run.model_copy(), group))


@lru_cache(maxsize=256)
def _shapes(run: RunSpec, group: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    with torch.device("meta"):
        module = build_group(run, group)
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def elements(run: RunSpec, group: str) -> int:
    """Parameters of ``group``."""
    return sum(int(np.prod(shape)) for shape in shapes(run, group).values())


def flatten(module: nn.Module) -> Vector:
    """A copy of all parameters, in the order of ``named_parameters``: shape [elements], float32."""
    return np.concatenate(
        [parameter.detach().float().cpu().numpy().ravel() for parameter in module.parameters()]
    ).astype(np.float32, copy=False)


@torch.no_grad()
def unflatten_(module: nn.Module, vector: Vector) -> None:
    """Set all parameters from ``vector``. Raises :class:`ValueError` if its length is not theirs."""
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    if vector.shape != (sum(sizes),):
        raise ValueError(f"a vector of shape {vector.shape} for {sum(sizes)} parameters")
    ends = np.cumsum([0, *sizes])
    for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True):
        part = torch.from_numpy(np.array(vector[start:end], dtype=np.float32))
        parameter.copy_(part.view(parameter.shape))


def named_tensors(run: RunSpec, group: str, vector: Vector) -> dict[str, Vector]:
    """The parameters in ``vector`` by name, as a checkpoint stores them."""
    if vector.shape != (elements(run, group),):
        raise ValueError(f"a vector of shape {vector.shape} for {elements(run, group)} parameters of {group}")
    tensors, start = {}, 0
    for name, shape in shapes(run, group).items():
        size = int(np.prod(shape))
        tensors[name] = vector[start : start + size].reshape(shape)
        start += size
    return tensors


def vector_of(run: RunSpec, group: str, tensors: dict[str, Vector]) -> Vector:
    """Inverse of :func:`named_tensors`. Raises :class:`ValueError` for a missing name or another shape."""
    parts = []
    for name, shape in shapes(run, group).items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            raise ValueError(f"{group} needs a tensor {name} of shape {shape}")
        parts.append(np.asarray(tensor, dtype=np.float32).ravel())
    return np.concatenate(parts)
