"""How good a chain of blocks is: from noise, on held-out text (design.md, section 5).

Every figure starts at z = σ_max·ε with ε fixed by (seed, position), never at a noisy target: a cross-entropy
averaged over training σ rewards leakage (paper.md, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.model.randomness import position_noise

EVALUATION_BATCH = 16


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropies in nats a byte, over ``bytes`` predicted bytes."""

    ce: list[float]
    """Of each block's own prediction, in the order of the chain."""
    ce_readout: float
    """Of the prediction that the run reads out."""
    ce_mean_log_probs: float
    """Of the mean of the blocks' log-probabilities, normalised."""
    perplexity: float
    bits_per_byte: float
    bytes: int


@torch.no_grad()
def from_noise(
    model: ComposedModel, windows: Tensor, seed: int = 0, batch: int = EVALUATION_BATCH
) -> Evaluation:
    """Measure the composed model on int64 [count, window + 1] windows of held-out text."""
    blocks = len(model.blocks)
    sums = torch.zeros(blocks + 2, dtype=torch.float64)
    for tokens_BT, targets_BT, noise_BTD in _batches(
        windows, seed, batch, model.run.model.width, _device(model.interface)
    ):
        logits, readout_BTV = model(tokens_BT, noise_BTD)
        mean_BTV = torch.stack([F.log_softmax(logits_BTV.float(), dim=-1) for logits_BTV in logits]).mean(0)
        sums += torch.stack([_nats(out, targets_BT) for out in (*logits, readout_BTV, mean_BTV)])
    count = windows.shape[0] * (windows.shape[1] - 1)
    *ce, ce_readout, ce_mean = (sums / count).tolist()
    return Evaluation(ce, ce_readout, ce_mean, math.exp(ce_readout), ce_readout / math.log(2), count)


@torch.no_grad()
def chain_ce(
    hops: Sequence[Hop], windows: Tensor, seed: int = 0, batch: int = EVALUATION_BATCH
) -> list[float]:
    """From-noise cross-entropy (nats a byte) after each of ``hops``, consecutive blocks of one chain.

    The first of them begins with pure noise at its own σ, which for block 0 is σ_max.
    """
    sums = torch.zeros(len(hops), dtype=torch.float64)
    first = hops[0]
    sigma, device = first.schedule.sigma(first.index), _device(first.interface)
    for tokens_BT, targets_BT, noise_BTD in _batches(windows, seed, batch, first.run.model.width, device):
        state = replace(first.start(noise_BTD), noisy_BTD=sigma * noise_BTD)
        with mixed_precision(device):
            for number, hop in enumerate(hops):
                state, logits_BTV = hop.step(tokens_BT, state)
                sums[number] += _nats(logits_BTV, targets_BT)
    return (sums / (windows.shape[0] * (windows.shape[1] - 1))).tolist()


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 arithmetic where that is faster: on CUDA."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def _batches(
    windows: Tensor, seed: int, batch: int, width: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens and targets [B, T] and the noise [B, T, width], the same for every window."""
    noise_TD = position_noise(seed, 0, windows.shape[1] - 1, width).to(device)
    for part in torch.split(windows, batch):
        part = part.to(device)
        yield part[:, :-1], part[:, 1:], noise_TD.expand(part.shape[0], -1, -1)


def _nats(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Summed cross-entropy, float64 on the CPU."""
    nats = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="sum")
    return nats.cpu().double()


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
