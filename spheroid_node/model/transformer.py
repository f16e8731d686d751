"""A causal transformer layer with rotary positions and a banded mask.

A position attends to itself and to the ``window − 1`` positions before it, so a text may grow past the
window and cached inference equals uncached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.model.cache import PositionCache, Segment
from spheroid_node.run import ModelSpec

ROTARY_BASE = 10_000.0


def rotary_angles(positions_T: Tensor, head_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions_T``: [T, head width / 2] each."""
    halves = torch.arange(0, head_width, 2, device=positions_T.device).to(dtype)
    angles = positions_T.to(dtype)[:, None] * ROTARY_BASE ** (-halves / head_width)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (first half, second half) of a head by the angle of its position."""
    cos, sin = (angle.to(x_BHTK.dtype) for angle in angles)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def band_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys], true where the query may look; the queries are the last of the keys."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= query) & (key > query - window)


class Attention(nn.Module):
    """Multi-head causal self-attention over at most ``window`` positions."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.heads = model.heads
        self.window = model.window
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.out = nn.Linear(model.width, model.width, bias=False)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], caches: Sequence[tuple[Segment, PositionCache]]
    ) -> Tensor:
        batch, count, width = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            self.qkv(x_BTD).view(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        q_BHTK, k_BHTK = rotate(q_BHTK, angles), rotate(k_BHTK, angles)
        if caches:
            parts = [self._cached(part, q_BHTK, k_BHTK, v_BHTK, cache) for part, cache in caches]
            mixed_BHTK = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        else:
            mixed_BHTK = self._attend(q_BHTK, k_BHTK, v_BHTK)
        return self.out(mixed_BHTK.transpose(1, 2).reshape(batch, count, width))  # type: ignore[no-any-return]

    def _cached(self, part: Segment, q: Tensor, k: Tensor, v: Tensor, cache: PositionCache) -> Tensor:
        """What the new positions of one text read of it: [B, H, count, K]."""
        new = slice(part.start, part.end)
        keys, values = cache.append(k[:, :, new], v[:, :, new])
        # Keys that no query of this call may see need not be read at all.
        first = max(0, keys.shape[2] - part.count - self.window + 1)
        return self._attend(q[:, :, new], keys[:, :, first:], values[:, :, first:])

    def _attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") and q_BHTK.device.type == "cpu":
            # On a CPU the backward pass of attention is three times slower in bfloat16 than in float32.
            with torch.autocast("cpu", enabled=False):
                return self._attend(q_BHTK.float(), k_BHTK.float(), v_BHTK.float())
        queries, keys = q_BHTK.shape[2], k_BHTK.shape[2]
        if queries == 1:
            return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)
        if queries == keys <= self.window:
            return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        mask = band_mask(queries, keys, self.window, q_BHTK.device)
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask)


class Layer(nn.Module):
    """Pre-norm attention and MLP. ``modulation`` scales and shifts what each of the two reads."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.width)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(model.width)
        self.mlp = make_mlp(model)

    def forward(
        self,
        x_BTD: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[tuple[Segment, PositionCache]] = (),
        modulation: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """[B, T, width] to the same; ``modulation`` is (scale, shift, scale, shift), each [B, 1, width].

        With ``caches`` the T positions are the new ones of these texts, one text after the other.
        """
        x_BTD = x_BTD + self.attention(modulated(self.attention_norm(x_BTD), modulation, 0), angles, caches)
        return x_BTD + self.mlp(modulated(self.mlp_norm(x_BTD), modulation, 1))  # type: ignore[no-any-return]


def make_mlp(model: ModelSpec) -> nn.Sequential:
    """The MLP over channels that every layer has."""
    inner = model.mlp_ratio * model.width
    return nn.Sequential(
        nn.Linear(model.width, inner, bias=False), nn.GELU(), nn.Linear(inner, model.width, bias=False)
    )


def modulated(read_BTD: Tensor, modulation: tuple[Tensor, ...] | None, part: int) -> Tensor:
    """What part 0 or 1 of a layer reads, under its (scale, shift) of a layer's four."""
    if modulation is None:
        return read_BTD
    scale_B1D, shift_B1D = modulation[2 * part : 2 * part + 2]
    return read_BTD * (1 + scale_B1D) + shift_B1D
