"""AdamW's moments and the worker's counters on disk, as safetensors (never by pickle)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from spheroid_node.errors import CheckpointInvalid, RunMismatch
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import read_tensors, write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_optimiser(
    path: Path,
    run: RunSpec,
    block: int,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    drawn: int,
) -> None:
    """Store the state of every parameter, and how many draws were made. Raises :class:`OSError`."""
    tensors = {
        f"{name}.{moment}": value.detach().cpu().numpy()
        for name, parameter in parameters.items()
        for moment, value in optimiser.state.get(parameter, {}).items()
    }
    metadata = {"run": run.run_id, "block": str(block), "drawn": str(drawn)}
    write_tensors(path, tensors, metadata)


def restore_optimiser(
    path: Path,
    run: RunSpec,
    block: int,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
) -> int:
    """Inverse of :func:`save_optimiser`; returns the number of draws.

    Raises :class:`CheckpointInvalid`, :class:`RunMismatch`, and then the optimiser is as before.
    """
    metadata, tensors = read_tensors(path)
    if metadata.get("run") != run.run_id:
        raise RunMismatch(run.run_id, metadata.get("run", "unknown"), str(path))
    if metadata.get("block") != str(block):
        raise CheckpointInvalid(str(path), f"it belongs to block {metadata.get('block')}, not {block}")
    state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    try:
        drawn = int(metadata["drawn"])
        for name, parameter in parameters.items() if tensors else ():
            moments = {moment: torch.from_numpy(tensors[f"{name}.{moment}"]) for moment in MOMENTS}
            if any(moments[moment].shape != parameter.shape for moment in MOMENTS[:2]):
                raise ValueError(f"{name} has another shape")
            state[parameter] = {moment: value.to(parameter.device) for moment, value in moments.items()}
    except (KeyError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"no moments that fit: {error}") from error
    optimiser.state.update(state)
    return drawn
