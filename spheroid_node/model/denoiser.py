"""The denoiser: how a block's output, the noisy code z and the target make a loss and an Euler step.

Three kinds (design.md, section 5; paper.md, sections 2 and 5):

* ``edm``: z enters the network, preconditioned as in EDM (Karras et al. 2022, arXiv 2206.00364, table 1).
  The network's logits are the prediction.
* ``evidence``: z never enters the network. Its exact Bayes evidence ⟨z, E_k⟩/σ² is added to the prior
  logits in the loss and in the Euler step, so that the target cannot leak, at any σ. The prior is read out.
* ``plain``: no noise at all. The loss is the cross-entropy of an ordinary language model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spheroid_node.run import RunSpec


class Denoiser:
    """Used by training, evaluation and inference alike. Codes E are unit-norm rows [256, width].

    σ_data is the root mean square of a component of a code, 1/√width.
    """

    def __init__(self, run: RunSpec) -> None:
        self.reads_noise = run.learning.denoiser == "edm"
        """Whether z enters the network."""
        self.adds_evidence = run.learning.denoiser == "evidence"
        """Whether the evidence of z is added to the logits."""
        self.sigma_data = 1 / math.sqrt(run.model.width)
        self._log_range = math.log(run.noise.sigma_min), math.log(run.noise.sigma_max)

    # --- preconditioning ----------------------------------------------------------------------------

    def skip_scale(self, sigma: Tensor) -> Tensor:
        """c_skip = σ_data²/(σ² + σ_data²): EDM, table 1."""
        return self.sigma_data**2 * self.input_scale(sigma).square()

    def output_scale(self, sigma: Tensor) -> Tensor:
        """c_out = σ·σ_data/√(σ² + σ_data²): EDM, table 1."""
        return self.sigma_data * sigma * self.input_scale(sigma)

    def input_scale(self, sigma: Tensor) -> Tensor:
        """c_in = 1/√(σ² + σ_data²): EDM, table 1."""
        return (sigma.square() + self.sigma_data**2).rsqrt()

    def noise_level(self, sigma: Tensor) -> Tensor:
        """ln σ mapped from the run's range to [−1, 1], in place of EDM's c_noise = ¼ ln σ.

        That spans 0 … 0.58 only on [1, 10] (paper.md, section 2).
        """
        low, high = self._log_range
        return 2 * (sigma.log() - low) / (high - low) - 1

    def weight(self, sigma: Tensor) -> Tensor:
        """σ_data²·w(σ) = (σ² + σ_data²)/σ², with EDM's w(σ) = (σ² + σ_data²)/(σ·σ_data)² (table 1).

        The constant factor makes its limit at large σ 1. It is 1 throughout unless the kind is ``edm``.
        """
        if not self.reads_noise:
            return torch.ones_like(sigma)
        return 1 + self.sigma_data**2 / sigma.square()

    def estimate(self, output_BTD: Tensor, noisy_BTD: Tensor, sigma_B: Tensor) -> Tensor:
        """What the head reads, [B, T, width], of the block's normalised output F.

        ``edm``: the denoised code D = c_skip·z + c_out·F (EDM, equation 7) over σ_data, so that a component
        has root mean square 1 as F has. The others read F itself.
        """
        if not self.reads_noise:
            return output_BTD
        skip_B11 = (self.skip_scale(sigma_B) / self.sigma_data)[:, None, None]
        output_B11 = (self.output_scale(sigma_B) / self.sigma_data)[:, None, None]
        return skip_B11 * noisy_BTD + output_B11 * output_BTD

    # --- loss and step ------------------------------------------------------------------------------

    def add_noise(self, targets_BT: Tensor, codes_VD: Tensor, sigma_B: Tensor, noise_BTD: Tensor) -> Tensor:
        """z = y + σ·ε for the codes y of ``targets_BT``: [B, T, width]."""
        return F.embedding(targets_BT, codes_VD) + sigma_B[:, None, None] * noise_BTD

    def posterior(self, logits_BTV: Tensor, noisy_BTD: Tensor, sigma_B: Tensor, codes_VD: Tensor) -> Tensor:
        """Logits of p(byte | context, z): the network's own, for ``evidence`` plus ⟨z, E_k⟩/σ²."""
        if not self.adds_evidence:
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
        """z at ``next_sigma``: ŷ + (σ_next/σ)·(z − ŷ), where ŷ is the expected code under the posterior.

        EDM, algorithm 1, without its second-order correction.
        """
        sigma_B = noisy_BTD.new_full((noisy_BTD.shape[0],), sigma)
        expected_BTD = self.posterior(logits_BTV, noisy_BTD, sigma_B, codes_VD).softmax(-1) @ codes_VD
        return expected_BTD + (next_sigma / sigma) * (noisy_BTD - expected_BTD)
