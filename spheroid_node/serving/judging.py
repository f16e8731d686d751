"""Which drafts hold: what the last hop makes of a line of drafts. Pure bookkeeping, no I/O.

A draft holds if the chain would have decided the same byte there. The chain's own decision is final where all
before it hold, so each piece of a line brings the drafts that hold and one decision more, and the first draft
that does not hold ends the line. What of it is still on its way is recognised by its place and is not even
computed.

A line may have branches: other drafts from some place on, in case the one there does not hold. Where the
chain decides what a branch begins with, the line goes on with it.
"""

from __future__ import annotations

from spheroid_node.serving.steps import Piece


class Judge:
    """Follows one text. All before :attr:`decided` is final."""

    def __init__(self) -> None:
        self.decided = 0
        """Index of the first byte that is not decided yet."""
        self._last: int | None = None
        self._line, self._branch = -1, 0
        """What the decided text has followed so far."""

    def due(self, piece: Piece) -> bool:
        """Whether ``piece`` goes on where the decided text ends; if not, its drafts follow one that failed.

        That the place and the byte are right is not enough: another branch may have the same byte there, and
        its states know of other bytes before it.
        """
        if piece.line < 0:
            return True
        if not piece.decide:  # fills caches that branches have cut; here only what is due has been cached
            return False
        if (piece.line, piece.after) != (self._line, self._branch) and piece.line <= self._line:
            return False
        return piece.position == self.decided - 1 and piece.tokens[0] == self._last

    def judge(self, piece: Piece, decided: bytes) -> bytes:
        """The bytes that are final now, of those that were ``decided`` after the positions of ``piece``."""
        if piece.line < 0:  # its tokens are known, and its decisions are what was asked for
            self._line, self._branch = -1, 0
            final = decided
        else:
            self._line, self._branch = piece.line, piece.branch
            held, first = 1, piece.count - piece.decide
            while held < len(decided) and piece.tokens[first + held] == decided[held - 1]:
                held += 1
            final = decided[:held]
        if final:
            self.decided, self._last = piece.first_decided + len(final), final[-1]
        return final
