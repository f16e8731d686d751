"""A chain's state as it travels from hop to hop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spheroid_node.model.composed import ChainState
from spheroid_node.run import VOCABULARY, RunSpec
from spheroid_node.serving.steps import Piece
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import State
from spheroid_node.wire.tensors import pack_tensor, unpack_tensor


def state_message(
    run: RunSpec, session: bytes, piece: Piece, state: ChainState, seconds: list[float]
) -> State:
    """``state`` of the positions of ``piece``, rounded as the run says."""
    log_probs_BTV = state.log_probs_BTV
    return State(
        session=session,
        position=piece.position,
        tokens=piece.tokens,
        masked=piece.masked,
        decide=piece.decide,
        line=piece.line,
        branch=piece.branch,
        after=piece.after,
        hidden=_packed(state.hidden_BTD, run.states),
        noisy=_packed(state.noisy_BTD, run.states),
        # A sum over blocks: what one more rounding does to it is no longer small beside a decision.
        log_probs=None if log_probs_BTV is None else _packed(log_probs_BTV, "float32"),
        seconds=seconds,
    )


def state_of(run: RunSpec, block: int, message: State) -> ChainState:
    """The state that came to ``block``, [1, n, ·] each. Raises :class:`WireError` (malformed)."""
    width, reads_mean = run.model.width, run.learning.readout == "mean"
    if (message.log_probs is not None) != reads_mean or len(message.seconds) != block:
        raise WireError(ErrorCode.MALFORMED, "a state of another run or block")
    count = len(message.tokens) + message.masked
    return ChainState(
        _unpacked(message.hidden, (count, width)),
        _unpacked(message.noisy, (count, width)),
        _unpacked(message.log_probs, (count, VOCABULARY)) if reads_mean else None,
    )


def rounded(run: RunSpec, piece: Piece, state: ChainState) -> ChainState:
    """What the next hop gets of ``state``: a chain in one process rounds it as one over the network does."""
    return state_of(run, 0, state_message(run, bytes(16), piece, state, []))


def joined(states: Sequence[State]) -> State:
    """Consecutive states of one line as a single message, each of whose positions decides its next byte."""
    first, tokens = states[0], b"".join(state.tokens for state in states)
    tensors = {
        name: _joined([getattr(state, name) for state in states])
        for name in ("hidden", "noisy", "log_probs")
        if getattr(first, name) is not None
    }
    seconds = [sum(spent) for spent in zip(*(state.seconds for state in states), strict=True)]
    return first.model_copy(update={"tokens": tokens, "decide": len(tokens), "seconds": seconds, **tensors})


def _joined(tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    width = tensors[0]["shape"][1]
    rows = sum(tensor["shape"][0] for tensor in tensors)
    data = b"".join(tensor["data"] for tensor in tensors)
    return {"dtype": tensors[0]["dtype"], "shape": [rows, width], "data": data}


def piece_of(message: State) -> Piece:
    return Piece(
        message.position,
        message.tokens,
        message.masked,
        message.decide,
        message.line,
        message.branch,
        message.after,
    )


def _packed(tensor_BTD: Tensor, dtype: str) -> dict[str, Any]:
    return pack_tensor(tensor_BTD.cpu().numpy()[0], dtype)


def _unpacked(fields: object, shape: tuple[int, int]) -> Tensor:
    array = unpack_tensor(fields, shape).astype(np.float64)  # a copy: a message's bytes are read-only
    if not np.isfinite(array).all():
        raise WireError(ErrorCode.MALFORMED, "a state that is not finite")
    return torch.from_numpy(array[None])
