"""One message through one hop: what the hop service runs in its worker thread."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from spheroid_node.model.composed import ChainState
from spheroid_node.run import VOCABULARY, RunSpec
from spheroid_node.serving.sessions import Session
from spheroid_node.serving.steps import Piece, advance, conclude
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Result, State, Step
from spheroid_node.wire.tensors import Vector, pack_tensor, unpack_tensor


def compute_step(
    run: RunSpec, session: Session, piece: Piece, work: Step | State
) -> tuple[State | Result, float]:
    """What this hop makes of ``work``, and the seconds it took.

    Raises :class:`WireError` (malformed) for a state that does not fit the run or is not finite.
    """
    opening, began = session.opening, time.perf_counter()
    incoming = unpack_state(run, opening.block, work) if isinstance(work, State) else None
    state, logits_BTV = advance(session.hop, session.cache, piece, incoming, opening.seed)
    before = work.seconds if isinstance(work, State) else []
    if opening.next is not None:
        onward = _state(session.id, piece, state)
        seconds = time.perf_counter() - began
        return onward.model_copy(update={"seconds": [*before, seconds]}), seconds
    decided, log_probs_NV = conclude(session.hop, piece, state, logits_BTV, opening.seed, opening.temperature)
    seconds = time.perf_counter() - began
    return Result(
        session=session.id,
        position=piece.first_decided,
        tokens=decided,
        logits=pack_tensor(log_probs_NV.numpy()) if opening.logits else None,
        seconds=[*before, seconds],
    ), seconds


def unpack_state(run: RunSpec, block: int, work: State) -> ChainState:
    """The tensors of a state that came to ``block``, [1, n, ·] each. Raises :class:`WireError`."""
    width, reads_mean = run.model.width, run.learning.readout == "mean"
    if (work.log_probs is not None) != reads_mean or len(work.seconds) != block:
        raise WireError(ErrorCode.MALFORMED, "a state of another run or block")
    count = len(work.tokens) + work.masked
    return ChainState(
        _tensor(work.hidden, (count, width)),
        _tensor(work.noisy, (count, width)),
        _tensor(work.log_probs, (count, VOCABULARY)) if reads_mean else None,
    )


def _state(session: bytes, piece: Piece, state: ChainState) -> State:
    log_probs_BTV = state.log_probs_BTV
    return State(
        session=session,
        position=piece.position,
        tokens=piece.tokens,
        masked=piece.masked,
        decide=piece.decide,
        hidden=pack_tensor(_array(state.hidden_BTD)),
        noisy=pack_tensor(_array(state.noisy_BTD)),
        log_probs=None if log_probs_BTV is None else pack_tensor(_array(log_probs_BTV)),
        seconds=[],
    )


def _tensor(fields: object, shape: tuple[int, int]) -> Tensor:
    array = unpack_tensor(fields, shape)
    if not np.isfinite(array).all():
        raise WireError(ErrorCode.MALFORMED, "a state that is not finite")
    return torch.from_numpy(array.copy())[None]  # a copy, since the bytes of a message are read-only


def _array(tensor_BTD: Tensor) -> Vector:
    return tensor_BTD[0].detach().float().cpu().numpy()
