"""What a worker learnt and no manifest contains (design.md, section 6, point 7)."""

from __future__ import annotations

import numpy as np

from spheroid_node.wire.tensors import Vector

DECAY = 0.9
"""What is left, a round later, of an update that was not taken: it was learnt from an older version."""


class Residual:
    """Error feedback for one group: nothing learnt is lost, whoever failed."""

    def __init__(self, elements: int, decay: float = DECAY) -> None:
        self.decay = decay
        self.vector: Vector = np.zeros(elements, dtype=np.float32)

    def add_to(self, update: Vector) -> Vector:
        """The update to send: what was learnt now and what was left over."""
        return update + self.vector

    def settle(self, sent: Vector, delivered: Vector, accepted: bool) -> None:
        """Keep what the next version lacks of ``sent``.

        Accepted: the error of compression, ``sent − delivered`` (``delivered`` as the aggregator decoded
        it). Not accepted: all of it, decayed. What is not finite is dropped, or it would never go away.
        """
        left = sent - delivered if accepted else np.float32(self.decay) * sent
        self.vector = np.where(np.isfinite(left), left, np.float32(0)).astype(np.float32)
