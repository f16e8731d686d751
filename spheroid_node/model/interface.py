"""The interface: what all blocks share. Byte embeddings, the codes made of them, and the head."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.run import VOCABULARY, ModelSpec

MASK = VOCABULARY
"""Token of a byte that is not known yet (one-sweep decoding)."""


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
        return F.normalize(self.embedding.weight[:VOCABULARY].detach().float(), dim=-1)
