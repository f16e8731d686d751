"""Every code that travels, each with its explanation in one place."""

from __future__ import annotations

from enum import StrEnum

PROTOCOL = (1, 1)
"""Oldest and newest protocol version this code speaks."""


class Verdict(StrEnum):
    """An aggregator's answer to an update."""

    ACCEPTED = "accepted"
    LATE = "late"
    REFUSED = "refused"


class Reason(StrEnum):
    """Why an update was not accepted."""

    NONE = ""
    AFTER_DEADLINE = "after-deadline"
    WRONG_RUN = "wrong-run"
    WRONG_GROUP = "wrong-group"
    WRONG_ROUND = "wrong-round"
    STALE_BASE = "stale-base"
    NOT_ELIGIBLE = "not-eligible"
    DUPLICATE = "duplicate"
    BAD_SHAPE = "bad-shape"
    BAD_DTYPE = "bad-dtype"
    BAD_DIGEST = "bad-digest"
    BAD_WEIGHT = "bad-weight"
    NOT_FINITE = "not-finite"
    NORM_TOO_LARGE = "norm-too-large"
    NO_ROOM = "no-room"
    WORSE = "worse"


REASONS: dict[Reason, str] = {
    Reason.NONE: "the update is part of the next version",
    Reason.AFTER_DEADLINE: "it arrived after the deadline of its round",
    Reason.WRONG_RUN: "it belongs to another run",
    Reason.WRONG_GROUP: "the aggregator does not hold this group",
    Reason.WRONG_ROUND: "its round is not the current one",
    Reason.STALE_BASE: "it was trained from another version than the aggregator's",
    Reason.NOT_ELIGIBLE: "its author does not own a replica of this group",
    Reason.DUPLICATE: "its author has already sent an update in this round",
    Reason.BAD_SHAPE: "its number of elements is not the group's",
    Reason.BAD_DTYPE: "its compression is not the run's",
    Reason.BAD_DIGEST: "its bytes do not match the digest its author signed",
    Reason.BAD_WEIGHT: "its weight is not what a worker can have trained in a round",
    Reason.NOT_FINITE: "it holds an infinity or a NaN",
    Reason.NORM_TOO_LARGE: "its norm is above the run's limit",
    Reason.NO_ROOM: "the aggregator has no room left for it",
    Reason.WORSE: "it would make the model worse on held-out text",
}


class ErrorCode(StrEnum):
    """Why a peer closes a connection or a session."""

    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    UNEXPECTED = "unexpected"
    WRONG_RUN = "wrong-run"
    WRONG_PROTOCOL = "wrong-protocol"
    NOT_AUTHENTIC = "not-authentic"
    NOT_ALLOWED = "not-allowed"
    NOT_FOUND = "not-found"
    VERSION_GONE = "version-gone"
    BUSY = "busy"
    TIMED_OUT = "timed-out"
    NEXT_HOP_LOST = "next-hop-lost"
    LAST_HOP_LOST = "last-hop-lost"
    LEAVING = "leaving"
    INTERNAL = "internal"


ERRORS: dict[ErrorCode, str] = {
    ErrorCode.MALFORMED: "a message does not follow the protocol",
    ErrorCode.TOO_LARGE: "a message or a count in it is above this peer's limit",
    ErrorCode.UNEXPECTED: "a message that is not allowed at this point",
    ErrorCode.WRONG_RUN: "the peer belongs to another run",
    ErrorCode.WRONG_PROTOCOL: "no protocol version in common",
    ErrorCode.NOT_AUTHENTIC: "a signature or certificate does not match the peer id",
    ErrorCode.NOT_ALLOWED: "this peer is not on the run's list",
    ErrorCode.NOT_FOUND: "the peer does not have what was asked for",
    ErrorCode.VERSION_GONE: "the peer no longer holds the version asked for",
    ErrorCode.BUSY: "the peer is at its limit of connections or sessions",
    ErrorCode.TIMED_OUT: "nothing was heard for too long",
    ErrorCode.NEXT_HOP_LOST: "the next hop of the chain cannot be reached",
    ErrorCode.LAST_HOP_LOST: "the last hop of the chain cannot be reached for its results",
    ErrorCode.LEAVING: "the peer is shutting down",
    ErrorCode.INTERNAL: "the peer failed; its log says why",
}


MAX_DETAIL = 512
"""Characters of an error's detail. It may quote what a peer sent, and goes back in an Error message."""


class WireError(Exception):
    """A violation of the protocol by the other side, or reported by it."""

    def __init__(self, code: ErrorCode, detail: str = "") -> None:
        self.code = code
        self.detail = detail[:MAX_DETAIL]
        super().__init__(f"{code}: {self.detail or ERRORS[code]}")
