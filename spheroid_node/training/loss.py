"""The loss of one block: what a training step computes, given all that is random in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spheroid_node.model.composed import Hop
from spheroid_node.model.interface import MASK
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
    """int64 [B, T + 1]: bytes, as inputs and, one further, as targets."""
    own: Noise
    ahead: Noise | None
    """Of the next block, where the own one looks ahead."""
    start_noise_BTD: Tensor | None
    """ε that the chain upstream starts from; None where it does not read z."""
    masked_BT: Tensor | None = None
    """bool: inputs in whose place all blocks read MASK; None where the run masks nothing."""

    @property
    def tokens_BT(self) -> Tensor:
        """What the blocks read: bytes, and MASK where the window is masked."""
        bytes_BT = self.windows_BT[:, :-1]
        return bytes_BT if self.masked_BT is None else bytes_BT.masked_fill(self.masked_BT, MASK)

    @property
    def targets_BT(self) -> Tensor:
        """The next bytes, masked or not."""
        return self.windows_BT[:, 1:]


@torch.no_grad()
def upstream_hidden(upstream: Sequence[Hop], draw: Draw, mixed: bool) -> Tensor:
    """Hidden state that the block after ``upstream`` receives, [B, T, width]: as it is at inference."""
    tokens_BT = draw.tokens_BT
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
    tokens_BT, targets_BT = draw.tokens_BT, draw.targets_BT
    denoiser, codes_VD = hop.denoiser, hop.interface.codes()
    noisy_BTD = denoiser.add_noise(targets_BT, codes_VD, at.sigma_B, at.noise_BTD)
    with mixed_precision(tokens_BT.device, mixed):
        hidden_BTD, logits_BTV = hop.predict(tokens_BT, hidden_BTD, noisy_BTD, at.sigma_B)
    return hidden_BTD, denoiser.loss(logits_BTV.float(), noisy_BTD, at.sigma_B, targets_BT, codes_VD)
