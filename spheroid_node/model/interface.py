"""The interface: what all blocks share. Byte embeddings, the codes made of them, and the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.run import VOCABULARY, ModelSpec

MASK = VOCABULARY
"""Token of a byte that is not known yet (one-sweep decoding)."""


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself if it has 32 or more bits a number, else as float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


class Interface(nn.Module):
    """Embeddings of the 256 bytes and of MASK, and a head from a block's hidden state to byte logits."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, model.width)
        self.head = nn.Linear(model.width, VOCABULARY, bias=False)

    def codes(self) -> Tensor:
        """E: unit-norm embeddings of the bytes, [256, width]. σ ∈ [1, 10] hides the target only at norm 1.

        Detached: a target that could move would learn to be recognised instead of predicted.
        """
        return F.normalize(at_least_float32(self.embedding.weight[:VOCABULARY].detach()), dim=-1)
