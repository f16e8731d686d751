"""Shapes larger than any memory, to measure how a chain carries them.

A logical hop computes and sends all that a hop of its shape would. But its weights are generated, not learnt,
and one layer's storage stands for every layer of every block: what it writes means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spheroid_node.model.block import Block
from spheroid_node.model.cache import Segment
from spheroid_node.model.composed import Hop
from spheroid_node.model.interface import Interface
from spheroid_node.run import RunSpec
from spheroid_node.serving.steps import DTYPE

DRAWN = 16_777_213
"""Elements of a tensor that are drawn; after these they repeat, since drawing billions takes a minute.

A prime, so that no two rows of a matrix are alike."""


class LogicalHop(Hop):
    """Its network computes in the precision of its weights; states come and go in that of serving."""

    def predict(
        self,
        tokens_BT: Tensor,
        hidden_BTD: Tensor,
        noisy_BTD: Tensor,
        sigma_B: Tensor,
        texts: Sequence[Segment] = (),
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`Hop.predict`."""
        dtype = self.interface.head.weight.dtype
        hidden_BTD, logits_BTV = super().predict(
            tokens_BT, hidden_BTD.to(dtype), noisy_BTD.to(dtype), sigma_B.to(dtype), texts
        )
        return hidden_BTD.to(DTYPE), logits_BTV.to(DTYPE)


class LogicalModel:
    """The hops of ``run`` over the storage of one layer. They have shapes alone until :meth:`generate`.

    The denoiser ``edm`` is for float32 alone: the features of its noise are.
    """

    def __init__(self, run: RunSpec, dtype: torch.dtype) -> None:
        self.dtype = dtype
        with torch.device("meta"):
            interface, first = Interface(run.model), Block(run, 0)
            later = Block(run, 1) if run.model.blocks > 1 else first
        layers = nn.ModuleList([first.layers[0]] * run.model.layers)
        for block in (first, later):
            block.layers, block.out_norm = layers, first.out_norm
            block.noisy, block.modulation = first.noisy, first.modulation
        self.hops = [
            LogicalHop(run, index, interface, later if index else first) for index in range(run.model.blocks)
        ]
        self._modules = nn.ModuleList(self.hops).to(dtype).eval().requires_grad_(False)

    @property
    def stored_bytes(self) -> int:
        """What the weights take up, each counted once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._modules.parameters())

    @torch.no_grad()
    def generate(self, seed: int = 0) -> LogicalModel:
        """Take memory, and fill it in place.

        Matrices have the variance 1/fan-in. A layer reads normalised states, so what it adds has a size of
        about 1, and the sum over all layers of a block stays far within half precision.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self._modules.modules():  # each once, in however many blocks it is
            module.to_empty(device="cpu", recurse=False)
        for name, parameter in self._modules.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(name.endswith("norm.weight"))
            else:
                deviation = 1.0 if name.endswith("embedding.weight") else 1 / math.sqrt(parameter.shape[1])
                _draw(parameter.view(-1), deviation, generator)
        return self


def _draw(elements_N: Tensor, deviation: float, generator: torch.Generator) -> None:
    bound = math.sqrt(3) * deviation
    drawn = elements_N[:DRAWN].uniform_(-bound, bound, generator=generator)
    for start in range(DRAWN, len(elements_N), DRAWN):
        part = elements_N[start : start + DRAWN]
        part.copy_(drawn[: len(part)])
