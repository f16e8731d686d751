"""How good a chain of blocks is: from noise, on held-out text (design.md, section 5).

Every figure starts at z = σ_max·ε with ε fixed by (seed, position), never at a noisy target: a cross-entropy
averaged over training σ rewards leakage (paper.md, section 4). What a block would do in other places than its
own is in :mod:`spheroid_node.training.diagnosis`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from spheroid_node.model.composed import ChainState, ComposedModel, Hop
from spheroid_node.model.randomness import position_noise
from spheroid_node.training.device import mixed_precision

EVALUATION_BATCH = 16

LARGEST_EXPONENT = math.log(sys.float_info.max)


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

    @classmethod
    def of(cls, ce: list[float], ce_readout: float, ce_mean_log_probs: float, count: int) -> Evaluation:
        """With the figures that follow from the others; ``count`` predicted bytes."""
        bits = ce_readout / math.log(2)
        # A model that was ruined can be so wrong that its perplexity is no float any more.
        perplexity = math.inf if ce_readout > LARGEST_EXPONENT else math.exp(ce_readout)
        return cls(ce, ce_readout, ce_mean_log_probs, perplexity, bits, count)


@torch.no_grad()
def from_noise(
    model: ComposedModel, windows: Tensor, seed: int = 0, batch: int = EVALUATION_BATCH
) -> Evaluation:
    """Measure the composed model on int64 [count, window + 1] windows of held-out text."""
    blocks = len(model.blocks)
    sums = torch.zeros(blocks + 2, dtype=torch.float64)
    for tokens_BT, targets_BT, noise_BTD in batches(
        windows, seed, batch, model.run.model.width, device_of(model.interface)
    ):
        logits, readout_BTV = model(tokens_BT, noise_BTD)
        sums += torch.stack([nats(out, targets_BT) for out in (*logits, readout_BTV, mean_log_probs(logits))])
    count = windows.shape[0] * (windows.shape[1] - 1)
    *ce, ce_readout, ce_mean = (sums / count).tolist()
    return Evaluation.of(ce, ce_readout, ce_mean, count)


@torch.no_grad()
def chain_ce(
    hops: Sequence[Hop], windows: Tensor, seed: int = 0, batch: int = EVALUATION_BATCH
) -> list[float]:
    """From-noise cross-entropy (nats a byte) after each of ``hops``, consecutive blocks of one chain.

    The first of them begins with pure noise at its own σ, which for block 0 is σ_max.
    """
    sums = torch.zeros(len(hops), dtype=torch.float64)
    device, width = device_of(hops[0].interface), hops[0].run.model.width
    for tokens_BT, targets_BT, noise_BTD in batches(windows, seed, batch, width, device):
        state = start_at(hops[0], noise_BTD)
        with mixed_precision(device, enabled=device.type == "cuda"):
            for number, hop in enumerate(hops):
                state, logits_BTV = hop.step(tokens_BT, state)
                sums[number] += nats(logits_BTV, targets_BT)
    return (sums / (windows.shape[0] * (windows.shape[1] - 1))).tolist()


def start_at(hop: Hop, noise_BTD: Tensor) -> ChainState:
    """State of a chain that begins at ``hop``: pure noise at its own σ, and no hidden state from upstream."""
    return replace(hop.start(noise_BTD), noisy_BTD=hop.schedule.sigma(hop.index) * noise_BTD)


def batches(
    windows: Tensor, seed: int, batch: int, width: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens and targets [B, T] and the noise [B, T, width], the same for every window."""
    noise_TD = position_noise(seed, 0, windows.shape[1] - 1, width).to(device)
    for part in torch.split(windows, batch):
        part = part.to(device)
        yield part[:, :-1], part[:, 1:], noise_TD.expand(part.shape[0], -1, -1)


def mean_log_probs(logits: Sequence[Tensor]) -> Tensor:
    """Mean over predictions [B, T, 256] of their log-probabilities; not normalised."""
    return torch.stack([F.log_softmax(logits_BTV.float(), dim=-1) for logits_BTV in logits]).mean(0)


def nats(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Summed cross-entropy, float64 on the CPU; summed there, so that the batch size does not matter."""
    each = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="none")
    return each.cpu().double().sum()


def device_of(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
