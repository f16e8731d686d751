"""The stack put together: one hop of it, or all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.model.block import Block
from spheroid_node.model.cache import Segment
from spheroid_node.model.denoiser import Denoiser
from spheroid_node.model.interface import Interface, at_least_float32
from spheroid_node.model.noise import NoiseSchedule
from spheroid_node.run import RunSpec


@dataclass(frozen=True)
class ChainState:
    """What goes from one hop to the next, for n new positions."""

    hidden_BTD: Tensor
    """Hidden state of the block before; zeros before block 0."""
    noisy_BTD: Tensor
    """z, the running estimate of the code of the next byte."""
    log_probs_BTV: Tensor | None
    """Sum of the blocks' log-probabilities so far; None unless the run reads out their mean."""

    def to(self, device: torch.device) -> ChainState:
        log_probs_BTV = self.log_probs_BTV
        return ChainState(
            self.hidden_BTD.to(device),
            self.noisy_BTD.to(device),
            None if log_probs_BTV is None else log_probs_BTV.to(device),
        )


class Hop(nn.Module):
    """One block with the interface: all that a node needs to train the block or to serve it."""

    def __init__(
        self, run: RunSpec, index: int, interface: Interface | None = None, block: Block | None = None
    ) -> None:
        super().__init__()
        self.run = run
        self.index = index
        self.schedule = NoiseSchedule(run.noise, run.model.blocks)
        self.denoiser = Denoiser(run)
        self.interface = Interface(run.model) if interface is None else interface
        self.block = Block(run, index) if block is None else block

    def start(self, noise_BTD: Tensor) -> ChainState:
        """State before block 0: z = σ_max·ε."""
        reads_mean = self.run.learning.readout == "mean"
        return ChainState(
            hidden_BTD=torch.zeros_like(noise_BTD),
            noisy_BTD=self.schedule.sigma(0) * noise_BTD,
            log_probs_BTV=noise_BTD.new_zeros(*noise_BTD.shape[:2], self.interface.head.out_features)
            if reads_mean
            else None,
        )

    def predict(
        self,
        tokens_BT: Tensor,
        hidden_BTD: Tensor,
        noisy_BTD: Tensor,
        sigma_B: Tensor,
        texts: Sequence[Segment] = (),
    ) -> tuple[Tensor, Tensor]:
        """Hidden state [B, T, width] and prior logits [B, T, 256] of this block at noise ``sigma_B``."""
        scaled_BTD = self.denoiser.input_scale(sigma_B)[:, None, None] * noisy_BTD
        level_B = self.denoiser.noise_level(sigma_B)
        hidden_BTD = self.block(self.interface.embedding(tokens_BT), hidden_BTD, scaled_BTD, level_B, texts)
        estimate_BTD = self.denoiser.estimate(self.block.out_norm(hidden_BTD), noisy_BTD, sigma_B)
        return hidden_BTD, self.interface.head(estimate_BTD)

    def step(
        self, tokens_BT: Tensor, state: ChainState, texts: Sequence[Segment] = ()
    ) -> tuple[ChainState, Tensor]:
        """One hop at inference: the state for the next block, and this block's prior logits [B, T, 256].

        With ``texts`` the T positions are new ones of these texts, one text after the other.
        """
        sigma, next_sigma = self.schedule.sigma(self.index), self.schedule.next_sigma(self.index)
        sigma_B = state.noisy_BTD.new_full((tokens_BT.shape[0],), sigma)
        hidden_BTD, logits_BTV = self.predict(tokens_BT, state.hidden_BTD, state.noisy_BTD, sigma_B, texts)
        codes_VD = self.interface.codes().to(state.noisy_BTD.dtype)
        log_probs_BTV = state.log_probs_BTV
        if log_probs_BTV is not None:
            log_probs_BTV = log_probs_BTV + F.log_softmax(at_least_float32(logits_BTV), dim=-1)
        noisy_BTD = self.denoiser.euler(logits_BTV, state.noisy_BTD, sigma, next_sigma, codes_VD)
        return ChainState(hidden_BTD, noisy_BTD, log_probs_BTV), logits_BTV

    def readout(self, state: ChainState, logits_BTV: Tensor) -> Tensor:
        """Log-probabilities [B, T, 256] of the next byte: the last block's own or the blocks' mean."""
        if state.log_probs_BTV is None:
            return F.log_softmax(at_least_float32(logits_BTV), dim=-1)
        return F.log_softmax(state.log_probs_BTV / self.run.model.blocks, dim=-1)


class ComposedModel(nn.Module):
    """All blocks in order, one interface: the model that the swarm trains."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__()
        self.run = run
        self.schedule = NoiseSchedule(run.noise, run.model.blocks)
        self.denoiser = Denoiser(run)
        self.interface = Interface(run.model)
        self.blocks = nn.ModuleList(Block(run, index) for index in range(run.model.blocks))

    def hop(self, index: int) -> Hop:
        """Hop ``index`` over this model's own parameters."""
        block = self.blocks[index]
        assert isinstance(block, Block)
        return Hop(self.run, index, self.interface, block)

    def forward(self, tokens_BT: Tensor, noise_BTD: Tensor) -> tuple[list[Tensor], Tensor]:
        """From noise: prior logits [B, T, 256] after every block, and the read-out's log-probabilities."""
        hops = [self.hop(index) for index in range(len(self.blocks))]
        state, logits = hops[0].start(noise_BTD), []
        for hop in hops:
            state, logits_BTV = hop.step(tokens_BT, state)
            logits.append(logits_BTV)
        return logits, hops[-1].readout(state, logits[-1])
