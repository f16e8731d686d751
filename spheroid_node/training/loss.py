"""The loss of one block: what a training step computes, given all that is random in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spheroid_node.model.composed import Hop
from spheroid_node.training.device import mixed_precision


@dataclass(frozen=True)
class Noise:
    """σ [B] and ε [B, T, width]: z = y + σ·ε."""

    sigma_B: Tensor
    noise_BTD: Tensor


@dataclass(frozen=True)
class Draw:
    """All that is random in one step."""

    windows_BT: Tensor
    """int64 [B, T + 1]: inputs and, one further, targets."""
    own: Noise
    ahead: Noise | None
    """Of the next block, where the own one looks ahead."""
    start_noise_BTD: Tensor | None
    """ε that the chain upstream starts from; None where it does not read z."""


@torch.no_grad()
def upstream_hidden(upstream: Sequence[Hop], draw: Draw, mixed: bool) -> Tensor:
    """Hidden state that the block after ``upstream`` receives, [B, T, width]: as it is at inference."""
    tokens_BT = draw.windows_BT[:, :-1]
    hidden_BTD = torch.zeros_like(draw.own.noise_BTD)
    if not upstream:
        return hidden_BTD
    with mixed_precision(tokens_BT.device, mixed):
        if draw.start_noise_BTD is not None:
            state = upstream[0].start(draw.start_noise_BTD)
            for hop in upstream:
                state, _ = hop.step(tokens_BT, state)
            return state.hidden_BTD
        embedded_BTD = upstream[0].interface.embedding(tokens_BT)
        for hop in upstream:
            # These blocks do not read z, so its place is taken by what is at hand, and neither head nor
            # Euler step is needed: an eighth of their arithmetic.
            hidden_BTD = hop.block(embedded_BTD, hidden_BTD, hidden_BTD, draw.own.sigma_B)
    return hidden_BTD


def block_loss(
    hop: Hop, ahead: Hop | None, draw: Draw, hidden_BTD: Tensor, mixed: bool
) -> tuple[Tensor, Tensor]:
    """What is minimised, and the block's own loss alone, in nats a byte.

    With ``ahead``, a frozen copy of the next block, the loss that this copy has on the block's hidden state
    is added by the run's weight. So a block also learns what the next one needs of it, and not only what its
    own prediction needs. That gradient goes through the copy into the own block, and nowhere else.
    """
    predicted_BTD, own = _loss_at(hop, draw, draw.own, hidden_BTD, mixed)
    if ahead is None or draw.ahead is None:
        return own, own.detach()
    _, further = _loss_at(ahead, draw, draw.ahead, predicted_BTD, mixed)
    return own + hop.run.learning.lookahead * further, own.detach()


def _loss_at(hop: Hop, draw: Draw, at: Noise, hidden_BTD: Tensor, mixed: bool) -> tuple[Tensor, Tensor]:
    """Hidden state and loss of one block at one noise level."""
    tokens_BT, targets_BT = draw.windows_BT[:, :-1], draw.windows_BT[:, 1:]
    denoiser, codes_VD = hop.denoiser, hop.interface.codes()
    noisy_BTD = denoiser.add_noise(targets_BT, codes_VD, at.sigma_B, at.noise_BTD)
    with mixed_precision(tokens_BT.device, mixed):
        hidden_BTD, logits_BTV = hop.predict(tokens_BT, hidden_BTD, noisy_BTD, at.sigma_B)
    return hidden_BTD, denoiser.loss(logits_BTV.float(), noisy_BTD, at.sigma_B, targets_BT, codes_VD)
