"""A block of the stack: what one worker owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.model.cache import BlockCache, Segment
from spheroid_node.model.mixing import MixingLayer
from spheroid_node.model.transformer import Layer, rotary_angles
from spheroid_node.run import RunSpec

NOISE_FEATURES = 32


class Modulation(nn.Module):
    """σ as sin/cos features → MLP → scale and shift for every layer; zero at version 0."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = layers
        self.features = nn.Linear(NOISE_FEATURES, width)
        self.out = nn.Linear(width, layers * 4 * width)

    def forward(self, level_B: Tensor) -> list[tuple[Tensor, ...]]:
        """For noise levels in [−1, 1]: four tensors [B, 1, width] a layer."""
        octaves = torch.pi * 2.0 ** torch.arange(NOISE_FEATURES // 2, device=level_B.device) / 8
        angles = level_B[:, None] * octaves
        hidden = F.silu(self.features(torch.cat((angles.sin(), angles.cos()), dim=-1)))
        parts = self.out(hidden)[:, None, :].chunk(4 * self.layers, dim=-1)
        return [tuple(parts[4 * layer : 4 * layer + 4]) for layer in range(self.layers)]


class Block(nn.Module):
    """``layers`` causal layers over byte embeddings, the state of the block before, and (``edm``) z.

    Each input has a projection of its own and comes normalised, so that none drowns another.
    """

    def __init__(self, run: RunSpec, index: int) -> None:
        super().__init__()
        model = run.model
        self.head_width = model.width // model.heads
        self.window = model.window
        chained = run.learning.conditioning == "chain" and index > 0
        reads_noise = run.learning.denoiser == "edm"
        self.upstream = nn.Linear(model.width, model.width, bias=False) if chained else None
        self.noisy = nn.Linear(model.width, model.width, bias=False) if reads_noise else None
        self.modulation = Modulation(model.layers, model.width) if reads_noise else None
        layer = Layer if model.mixer == "attention" else MixingLayer
        self.layers = nn.ModuleList(layer(model) for _ in range(model.layers))
        self.out_norm = nn.RMSNorm(model.width)

    def new_cache(self) -> BlockCache:
        return BlockCache(len(self.layers), self.window)

    def forward(
        self,
        embedded_BTD: Tensor,
        hidden_BTD: Tensor,
        scaled_noisy_BTD: Tensor,
        level_B: Tensor,
        texts: Sequence[Segment] = (),
    ) -> Tensor:
        """Hidden state [B, T, width]: ``out_norm`` of it is the denoiser's F, itself goes to the next block.

        ``scaled_noisy_BTD`` is c_in·z and ``level_B`` the noise level; only ``edm`` reads them. With
        ``texts`` the T positions are new ones of these texts, one text after the other; without, whole texts.
        """
        x_BTD = embedded_BTD
        if self.upstream is not None:
            x_BTD = x_BTD + self.upstream(F.rms_norm(hidden_BTD, hidden_BTD.shape[-1:]))
        if self.noisy is not None:
            x_BTD = x_BTD + self.noisy(scaled_noisy_BTD)
        angles = rotary_angles(_positions(x_BTD, texts), self.head_width, _exact(x_BTD.dtype))
        modulations = self.modulation(level_B) if self.modulation is not None else [None] * len(self.layers)
        for number, layer in enumerate(self.layers):
            caches = [(text, text.cache.layers[number]) for text in texts]
            x_BTD = layer(x_BTD, angles, caches, modulations[number])
        return x_BTD


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Angles of far positions need more than 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _positions(x_BTD: Tensor, texts: Sequence[Segment]) -> Tensor:
    """Index in its text of each of the T positions."""
    if not texts:
        return torch.arange(x_BTD.shape[1], device=x_BTD.device)
    ranges = [range(text.cache.length, text.cache.length + text.count) for text in texts]
    return torch.tensor([position for text in ranges for position in text], device=x_BTD.device)
