"""A causal MLP over positions, in place of attention where the run's mixer is ``mlp``.

What a position takes from one before it depends on their distance alone, not on their contents. So a text may
grow past the window and cached inference equals uncached, as with attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.model.cache import PositionCache, Segment
from spheroid_node.model.transformer import make_mlp, modulated
from spheroid_node.run import ModelSpec

EXPANSION = 2
"""Hidden channels a channel of the model: then the two projections are as large as those of attention."""

MAX_KERNELS = 16
"""More learnt no faster in short runs, and each costs a matrix of positions by positions in a step."""


class Mixing(nn.Module):
    """Projection, causal mixing along positions with learned kernels, GELU, projection back.

    A kernel has a weight for each of the ``window`` distances 0 … window − 1, and is shared by as many
    neighbouring channels as there are for each of the ``MAX_KERNELS`` kernels.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden = EXPANSION * model.width
        self.window = model.window
        self.read = nn.Linear(model.width, hidden, bias=False)
        self.kernels = nn.Parameter(torch.zeros(math.gcd(hidden, MAX_KERNELS), model.window))
        self.out = nn.Linear(hidden, model.width, bias=False)

    def forward(self, x_BTD: Tensor, caches: Sequence[tuple[Segment, PositionCache]]) -> Tensor:
        inputs_BSH = self.read(x_BTD)
        if caches:
            parts = [self._cached(part, inputs_BSH, cache) for part, cache in caches]
            mixed_BTH = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        else:
            mixed_BTH = self._mix(inputs_BSH, x_BTD.shape[1])
        return self.out(F.gelu(mixed_BTH))  # type: ignore[no-any-return]

    def _cached(self, part: Segment, inputs_BTH: Tensor, cache: PositionCache) -> Tensor:
        held_BSH = cache.append(inputs_BTH[:, part.start : part.end])[0]
        # Positions that no new one may see need not be read at all.
        return self._mix(held_BSH[:, -(part.count + self.window - 1) :], part.count)

    def _mix(self, inputs_BSH: Tensor, count: int) -> Tensor:
        """The last ``count`` of the positions, each mixed with those before it: [B, count, hidden]."""
        batch, seen, hidden = inputs_BSH.shape
        kernels = self.kernels.shape[0]
        # One matrix product a kernel; its columns are the texts and the channels that share the kernel.
        columns_KSN = inputs_BSH.reshape(batch, seen, kernels, -1).permute(2, 1, 0, 3).flatten(2)
        mixed_KTN = distance_matrices(self.kernels, count, seen) @ columns_KSN
        mixed_KTBC = mixed_KTN.view(kernels, count, batch, hidden // kernels)
        return mixed_KTBC.permute(2, 1, 0, 3).reshape(batch, count, hidden)


def distance_matrices(kernels_KW: Tensor, count: int, seen: int) -> Tensor:
    """[K, count, seen]: the weight of each seen position for each of the last ``count`` of them.

    It is the kernel's at their distance, and 0 for positions that come later or ``window`` or more before.
    """
    window = kernels_KW.shape[1]
    # Weights in the order of falling distance, from seen − 1 down to −(count − 1): every row of a matrix is a
    # stretch of them, the last row the first stretch. A negative padding cuts off.
    falling = F.pad(kernels_KW.flip(-1), (seen - window, count - 1))
    return falling.unfold(-1, seen, 1).flip(1)


class MixingLayer(nn.Module):
    """Pre-norm mixing of positions and MLP. ``modulation`` scales and shifts what each of the two reads."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.mixing_norm = nn.RMSNorm(model.width)
        self.mixing = Mixing(model)
        self.mlp_norm = nn.RMSNorm(model.width)
        self.mlp = make_mlp(model)

    def forward(
        self,
        x_BTD: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[tuple[Segment, PositionCache]] = (),
        modulation: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """As :meth:`spheroid_node.model.transformer.Layer.forward`; ``angles`` are for attention alone."""
        x_BTD = x_BTD + self.mixing(modulated(self.mixing_norm(x_BTD), modulation, 0), caches)
        return x_BTD + self.mlp(modulated(self.mlp_norm(x_BTD), modulation, 1))  # type: ignore[no-any-return]
