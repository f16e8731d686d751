"""Frozen copies of other workers' blocks (design.md, section 5: `chain`).

Those upstream give the hidden state that the own block receives; the next one tells what it can make of the
own block's. A copy costs 2 bytes a parameter: matrices are kept in half precision, and there is neither a
gradient nor optimiser state. Copies are refreshed every round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spheroid_node.model.block import Block
from spheroid_node.model.cache import Segment
from spheroid_node.model.composed import Hop
from spheroid_node.model.interface import Interface
from spheroid_node.run import RunSpec


class FrozenBlock(Block):
    """A block that is run and never trained. Vectors (norms, biases) stay float32: they weigh nothing."""

    def __init__(self, run: RunSpec, index: int, matrices: torch.dtype) -> None:
        super().__init__(run, index)
        self.requires_grad_(False)
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                parameter.data = parameter.data.to(matrices)
        with torch.device("meta"):
            # In a tuple, so that it does not count as a part of this module.
            self._exact: tuple[nn.Module] = (Block(run, index).requires_grad_(False),)

    def forward(
        self,
        embedded_BTD: Tensor,
        hidden_BTD: Tensor,
        scaled_noisy_BTD: Tensor,
        level_B: Tensor,
        texts: Sequence[Segment] = (),
    ) -> Tensor:
        """As :meth:`Block.forward`."""
        arguments = (embedded_BTD, hidden_BTD, scaled_noisy_BTD, level_B, texts)
        if torch.is_autocast_enabled(embedded_BTD.device.type):
            return super().forward(*arguments)
        # Arithmetic is in float32 here: the copy is widened for as long as it runs, one block at a time.
        widened = {name: parameter.float() for name, parameter in self.named_parameters()}
        hidden: Tensor = functional_call(self._exact[0], widened, arguments)
        return hidden


def frozen_hop(run: RunSpec, index: int, interface: Interface, mixed: bool) -> Hop:
    """A frozen copy of block ``index``, over the memory of ``interface`` but without gradient for it."""
    with torch.device("meta"):
        shared = Interface(run.model).requires_grad_(False)
    for mine, theirs in zip(shared.modules(), interface.modules(), strict=True):
        for name, parameter in theirs.named_parameters(recurse=False):
            setattr(mine, name, nn.Parameter(parameter.data, requires_grad=False))
    return Hop(run, index, shared, FrozenBlock(run, index, half_dtype(mixed)))


def half_dtype(mixed: bool) -> torch.dtype:
    """What matrices are kept in: bfloat16 where training computes in it anyway, else the finer float16."""
    return torch.bfloat16 if mixed else torch.float16


def bytes_of(module: nn.Module) -> int:
    """What the parameters of ``module`` take up."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
