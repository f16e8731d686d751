"""Which drafts hold: what the last hop makes of a line of drafts. Pure bookkeeping, no I/O.

A draft holds if the chain would have decided the same byte there. The chain's own decision is final where all
before it hold, so each piece of a line brings the drafts that hold and one decision more, and the first draft
that does not hold ends the line. What of it is still on its way is recognised by its place and is not even
computed.
"""

from __future__ import annotations

from spheroid_node.serving.steps import Piece


class Judge:
    """Follows one text. All before :attr:`decided` is final."""

    def __init__(self) -> None:
        self.decided = 0
        """Index of the first byte that is not decided yet."""
        self._last: int | None = None

    def due(self, piece: Piece) -> bool:
        """Whether ``piece`` goes on where the decided text ends; if not, its line has failed before it."""
        if piece.line < 0:
            return True
        return piece.position == self.decided - 1 and piece.tokens[0] == self._last

    def judge(self, piece: Piece, decided: bytes) -> bytes:
        """The bytes that are final now, of those that were ``decided`` after the positions of ``piece``."""
        if piece.line < 0:  # its tokens are known, and its decisions are what was asked for
            final = decided
        else:
            held, first = 1, piece.count - piece.decide
            while held < len(decided) and piece.tokens[first + held] == decided[held - 1]:
                held += 1
            final = decided[:held]
        if final:
            self.decided, self._last = piece.first_decided + len(final), final[-1]
        return final
