"""The denoiser: how a block's logits, the noisy code z and the target make a loss and an Euler step.

Two kinds (design.md, section 5; paper.md, sections 2 and 5):

* ``edm``: z enters the network, scaled by EDM's c_in; the network's logits are the prediction.
* ``evidence``: z never enters the network. Its exact Bayes evidence ⟨z, E_k⟩/σ² is added to the prior
  logits in the loss and in the Euler step, so that the target cannot leak, at any σ. The prior is read out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spheroid_node.run import RunSpec


class Denoiser:
    """Used by training, evaluation and inference alike. Codes E are unit-norm rows [256, width]."""

    def __init__(self, run: RunSpec) -> None:
        self.reads_noise = run.learning.denoiser == "edm"
        """Whether z enters the network."""
        self._sigma_data = 1 / math.sqrt(run.model.width)
        self._log_range = math.log(run.noise.sigma_min), math.log(run.noise.sigma_max)

    def input_scale(self, sigma: Tensor) -> Tensor:
        """c_in = 1/√(σ² + σ_data²), with σ_data = 1/√width for unit-norm codes."""
        return (sigma.square() + self._sigma_data**2).rsqrt()

    def noise_level(self, sigma: Tensor) -> Tensor:
        """ln σ mapped from the run's range to [−1, 1]; ¼ ln σ of EDM spans too little of it on [1, 10]."""
        low, high = self._log_range
        return 2 * (sigma.log() - low) / (high - low) - 1

    def weight(self, sigma: Tensor) -> Tensor:
        """EDM's w(σ) = (σ² + σ_data²)/(σ·σ_data)², divided by its limit at large σ; 1 for ``evidence``."""
        if not self.reads_noise:
            return torch.ones_like(sigma)
        return 1 + self._sigma_data**2 / sigma.square()

    def add_noise(self, targets_BT: Tensor, codes_VD: Tensor, sigma_B: Tensor, noise_BTD: Tensor) -> Tensor:
        """z = y + σ·ε for the codes y of ``targets_BT``: [B, T, width]."""
        return F.embedding(targets_BT, codes_VD) + sigma_B[:, None, None] * noise_BTD

    def posterior(self, logits_BTV: Tensor, noisy_BTD: Tensor, sigma_B: Tensor, codes_VD: Tensor) -> Tensor:
        """Logits of p(byte | context, z): the prior plus the evidence of z, or the network's own."""
        if self.reads_noise:
            return logits_BTV
        return logits_BTV + noisy_BTD @ codes_VD.T / sigma_B[:, None, None].square()

    def loss(
        self, logits_BTV: Tensor, noisy_BTD: Tensor, sigma_B: Tensor, targets_BT: Tensor, codes_VD: Tensor
    ) -> Tensor:
        """Weighted mean cross-entropy of the posterior against the next bytes, in nats."""
        posterior_BTV = self.posterior(logits_BTV, noisy_BTD, sigma_B, codes_VD)
        if not self.reads_noise:
            return F.cross_entropy(posterior_BTV.flatten(0, 1), targets_BT.flatten())
        losses_BT = F.cross_entropy(posterior_BTV.transpose(1, 2), targets_BT, reduction="none")
        return (self.weight(sigma_B)[:, None] * losses_BT).mean()

    def euler(
        self, logits_BTV: Tensor, noisy_BTD: Tensor, sigma: float, next_sigma: float, codes_VD: Tensor
    ) -> Tensor:
        """z at ``next_sigma``: ŷ + (σ_next/σ)·(z − ŷ), where ŷ is the expected code under the posterior."""
        sigma_B = noisy_BTD.new_full((noisy_BTD.shape[0],), sigma)
        expected_BTD = self.posterior(logits_BTV, noisy_BTD, sigma_B, codes_VD).softmax(-1) @ codes_VD
        return expected_BTD + (next_sigma / sigma) * (noisy_BTD - expected_BTD)
