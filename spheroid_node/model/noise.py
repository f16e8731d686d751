"""Which block owns which noise level, in both directions. Training and inference both ask this one object.

σ has a log-normal density truncated to [σ_min, σ_max], cut into B intervals of equal probability mass
(paper.md, section 2). Block 0 owns the highest noise.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from spheroid_node.run import NoiseSpec


class NoiseSchedule:
    """σ ↔ block for a run of ``blocks`` blocks."""

    def __init__(self, spec: NoiseSpec, blocks: int) -> None:
        self.blocks = blocks
        self._spec = spec
        self._log_density = NormalDist(spec.p_mean, spec.p_std)
        low, high = self._mass(spec.sigma_min), self._mass(spec.sigma_max)
        inner = [
            math.exp(self._log_density.inv_cdf(high - (high - low) * block / blocks))
            for block in range(1, blocks)
        ]
        self.edges = (spec.sigma_max, *inner, spec.sigma_min)
        """B + 1 noise levels, from σ_max down to σ_min; block b owns edges[b + 1] … edges[b]."""

    def interval(self, block: int) -> tuple[float, float]:
        """Lowest and highest σ of ``block``, without overlap."""
        return self.edges[block + 1], self.edges[block]

    def training_interval(self, block: int) -> tuple[float, float]:
        """The interval widened at both ends by ``overlap`` of its log-range, clamped to the run's range."""
        low, high = self.interval(block)
        reach = (high / low) ** self._spec.overlap
        return max(low / reach, self._spec.sigma_min), min(high * reach, self._spec.sigma_max)

    def sigma(self, block: int) -> float:
        """σ at which ``block`` runs at inference."""
        return self.edges[block]

    def next_sigma(self, block: int) -> float:
        """σ after the Euler step of ``block``."""
        return self.edges[block + 1]

    def block_of(self, sigma: float) -> int:
        """The block that owns ``sigma``; an edge belongs to the block that runs there at inference.

        Raises :class:`ValueError` outside [σ_min, σ_max].
        """
        if not self.edges[-1] <= sigma <= self.edges[0]:
            raise ValueError(f"σ = {sigma} is outside [{self.edges[-1]}, {self.edges[0]}]")
        return sum(sigma <= edge for edge in self.edges[1:-1])

    def sample(self, block: int, uniform: Tensor) -> Tensor:
        """σ of the training interval by inverse CDF; ``uniform`` in [0, 1), same shape."""
        low, high = (self._mass(sigma) for sigma in self.training_interval(block))
        quantile = (low + (high - low) * uniform.double()).clamp(1e-12, 1 - 1e-12)
        log_sigma = self._spec.p_mean + self._spec.p_std * torch.special.ndtri(quantile)
        sigma: Tensor = log_sigma.exp().to(uniform.dtype)
        return sigma

    def _mass(self, sigma: float) -> float:
        return self._log_density.cdf(math.log(sigma))
