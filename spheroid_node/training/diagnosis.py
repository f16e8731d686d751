"""What each block of a chain does alone and in other places than its own, on held-out text, in nats a byte.

Beside the from-noise figures (evaluation.py) these answer the questions of paper.md, section 4: is one block
as good as the chain, does a block read the target out of z, does the model use its context. The noise at a
position of a window is fixed by (seed, position), so neither the batch size nor what was measured before
matters.

* **alone**: a chain of this one block. It starts from pure noise at its own σ, and a block that receives a
  hidden state (``chain``) receives zeros, as block 0 does.
* **at σ_max**: the block in its place, with the hidden state from upstream, but with z = σ_max·ε: what it
  predicts when z holds nothing, neither a target nor what the blocks before believe.
* **local**: the block in its place with z = y + σ·ε of the true next byte's code y, at the median σ of its
  training interval: what training rewards. A prediction far better than from noise is leakage: the block
  reads y out of z, and at inference there is no y in z. The posterior, which ``evidence`` trains, knows z
  too; a good one is no leakage, since the prior alone is read out.
* **scrambled**: from noise, with the bytes of the context permuted within the window and the targets in
  place. A model that uses its context gets worse. Later bytes may come before their target, but nothing says
  which they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.model.randomness import position_noise, stream
from spheroid_node.training.evaluation import (
    EVALUATION_BATCH,
    Evaluation,
    batches,
    device_of,
    mean_log_probs,
    nats,
    start_at,
)

LEAK_SHARE = 0.75
"""A block leaks if its local CE is below this share of its from-noise CE.

At σ ≥ 1 the little that z says about a byte (paper.md, section 4) takes less than that off.
"""


@dataclass(frozen=True)
class Diagnosis:
    """Cross-entropies in nats a byte; lists have an entry a block, in the order of the chain."""

    from_noise: Evaluation
    ce_mean_last_two: float
    """From noise: of the mean of the last two blocks' log-probabilities, normalised."""
    ce_alone: list[float]
    ce_at_sigma_max: list[float]
    sigma_local: list[float]
    """The σ at which the local figures were measured."""
    ce_local: list[float]
    """Of the block's own prediction."""
    ce_local_posterior: list[float]
    """Of the posterior, which the loss trains; equal to ``ce_local`` unless the denoiser adds evidence."""
    ce_scrambled: list[float]
    ce_scrambled_readout: float
    seed: int

    @property
    def adds_evidence(self) -> bool:
        """Whether the posterior is another prediction than the block's own."""
        return self.ce_local_posterior != self.ce_local

    @property
    def leaking(self) -> list[int]:
        """The blocks that predict the target far better when it is in z than from noise."""
        pairs = zip(self.ce_local, self.from_noise.ce, strict=True)
        return [block for block, (local, from_noise) in enumerate(pairs) if local < LEAK_SHARE * from_noise]


@torch.no_grad()
def diagnose(
    model: ComposedModel, windows: Tensor, seed: int = 0, batch: int = EVALUATION_BATCH
) -> Diagnosis:
    """Measure every block on int64 [count, window + 1] windows of held-out text.

    About five times the arithmetic of ``from_noise``.
    """
    hops = [model.hop(block) for block in range(len(model.blocks))]
    window, width, device = windows.shape[1] - 1, model.run.model.width, device_of(model.interface)
    sigmas = [_median_sigma(hop) for hop in hops]
    # Of the positions after the window: in training, too, the noise of z is not the noise that the chain
    # upstream began from. With the same ε a hidden state could tell it, and with it the target.
    local_TD = position_noise(seed, window, window, width).to(device)
    order_T = torch.from_numpy(stream(seed, window).permutation(window)).to(device)

    by_block = torch.zeros(6, len(hops), dtype=torch.float64)
    readouts = torch.zeros(4, dtype=torch.float64)
    for tokens_BT, targets_BT, noise_BTD in batches(windows, seed, batch, width, device):
        hidden, logits, readout_BTV = _chain(hops, tokens_BT, noise_BTD)
        _, scrambled, scrambled_readout_BTV = _chain(hops, tokens_BT[:, order_T], noise_BTD)
        local_BTD = local_TD.expand_as(noise_BTD)
        for block, hop in enumerate(hops):
            predictions = (
                logits[block],
                hop.step(tokens_BT, start_at(hop, noise_BTD))[1],
                _at_sigma_max(hop, tokens_BT, hidden[block], noise_BTD),
                *_local(hop, tokens_BT, targets_BT, hidden[block], local_BTD, sigmas[block]),
                scrambled[block],
            )
            by_block[:, block] += torch.stack([nats(out, targets_BT) for out in predictions])
        outs = (readout_BTV, mean_log_probs(logits), mean_log_probs(logits[-2:]), scrambled_readout_BTV)
        readouts += torch.stack([nats(out, targets_BT) for out in outs])

    count = windows.shape[0] * window
    from_noise, alone, at_sigma_max, local, posterior, scrambled_ce = (by_block / count).tolist()
    readout, mean, last_two, scrambled_readout = (readouts / count).tolist()
    return Diagnosis(
        from_noise=Evaluation.of(from_noise, readout, mean, count),
        ce_mean_last_two=last_two,
        ce_alone=alone,
        ce_at_sigma_max=at_sigma_max,
        sigma_local=sigmas,
        ce_local=local,
        ce_local_posterior=posterior,
        ce_scrambled=scrambled_ce,
        ce_scrambled_readout=scrambled_readout,
        seed=seed,
    )


def _chain(
    hops: Sequence[Hop], tokens_BT: Tensor, noise_BTD: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """From noise: the hidden state [B, T, width] that each block receives, its logits, and the read-out."""
    state, hidden, logits = hops[0].start(noise_BTD), [], []
    for hop in hops:
        hidden.append(state.hidden_BTD)
        state, logits_BTV = hop.step(tokens_BT, state)
        logits.append(logits_BTV)
    return hidden, logits, hops[-1].readout(state, logits[-1])


def _at_sigma_max(hop: Hop, tokens_BT: Tensor, hidden_BTD: Tensor, noise_BTD: Tensor) -> Tensor:
    """Logits [B, T, 256] of a block whose z is σ_max·ε."""
    sigma_B = noise_BTD.new_full((noise_BTD.shape[0],), hop.schedule.sigma(0))
    return hop.predict(tokens_BT, hidden_BTD, sigma_B[:, None, None] * noise_BTD, sigma_B)[1]


def _local(
    hop: Hop, tokens_BT: Tensor, targets_BT: Tensor, hidden_BTD: Tensor, noise_BTD: Tensor, sigma: float
) -> tuple[Tensor, Tensor]:
    """Logits [B, T, 256] with the true target in z: the block's own, and those of the posterior."""
    sigma_B = noise_BTD.new_full((noise_BTD.shape[0],), sigma)
    codes_VD = hop.interface.codes()
    noisy_BTD = hop.denoiser.add_noise(targets_BT, codes_VD, sigma_B, noise_BTD)
    logits_BTV = hop.predict(tokens_BT, hidden_BTD, noisy_BTD, sigma_B)[1]
    return logits_BTV, hop.denoiser.posterior(logits_BTV, noisy_BTD, sigma_B, codes_VD)


def _median_sigma(hop: Hop) -> float:
    """Half of the σ that the block is trained at are lower."""
    return hop.schedule.sample(hop.index, torch.tensor([0.5])).item()
