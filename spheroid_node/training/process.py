"""The trainer as a process of its own: ``python -m spheroid_node.training.process``.

A crash or an out-of-memory here costs a round, never the node (design.md, section 5). It speaks
trainer_protocol on stdin and stdout, logs JSON lines to stderr, and never outlives its parent: the kernel
kills it with the parent where it can, and the end of stdin ends it everywhere.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import structlog
import torch

from spheroid_node.errors import CheckpointInvalid, RunMismatch, SpheroidError
from spheroid_node.run import RunSpec
from spheroid_node.training.device import resolve_device
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.text import held_out_windows, load_text
from spheroid_node.training.trainer_protocol import (
    FRAME_LIMIT,
    Configure,
    Evaluate,
    Load,
    Save,
    Screen,
    Stop,
    Take,
    Train,
    decode,
    encode,
    failure,
    parse_request,
)
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import FrameDecoder
from spheroid_node.wire.messages import Message
from spheroid_node.wire.tensors import decode_vector, encode_vector

READ_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1

log = structlog.get_logger()


class TrainerService:
    """Answers requests one at a time; ``stopping`` ends training under way."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._trainer: LocalTrainer | None = None
        self._state = Path()
        self._step_seconds = 0.0
        self._held_out: dict[int, torch.Tensor] = {}

    def answer(self, request: Message) -> dict[str, Any]:
        """The reply to ``request``. Raises whatever went wrong; the service can go on after it."""
        if isinstance(request, Configure):
            return self._configure(request)
        if self._trainer is None:
            raise WireError(ErrorCode.UNEXPECTED, "the first request must be configure")
        match request:
            case Load():
                self._load(self._trainer, request)
                return {}
            case Train():
                return self._train(self._trainer, request)
            case Take():
                taken = {group: self._trainer.take(group) for group in self._trainer.groups}
                return {"updates": {group: encode_vector(taken[group], "float32") for group in taken}}
            case Evaluate():
                return {"ce": self._trainer.evaluate_versions(self._windows(request.windows))}
            case Screen():
                return self._screen(self._trainer, request)
            case Save():
                self._trainer.save(self._state)
                return {}
            case _:
                raise WireError(ErrorCode.UNEXPECTED, type(request).__name__)

    def _configure(self, request: Configure) -> dict[str, Any]:
        run = RunSpec.unpack(request.run)
        device = resolve_device(request.device)
        torch.set_num_threads(request.threads)
        text = load_text(run.data, request.data, request.held_out, run.model.window)
        trainer = LocalTrainer(
            run, request.block, text, device, request.worker_seed, request.precision, request.compiled
        )
        trainer.warm_up()
        self._state = Path(request.state)
        if self._state.is_file():
            try:
                trainer.restore(self._state)
            except (CheckpointInvalid, RunMismatch) as error:  # moments grow again; no reason to stop
                log.warning("trainer.state_discarded", cause=error.problem)
        self._trainer = trainer
        return {
            "device": str(device),
            "precision": "bf16" if trainer.mixed else "float32",
            "copied_bytes": trainer.copied_bytes,
            "train_bytes": len(text.train),
            "held_out_bytes": len(text.held_out),
            "eval_windows": len(text.held_out) // (run.model.window + 1),
            "drawn": trainer.drawn,
        }

    def _load(self, trainer: LocalTrainer, request: Load) -> None:
        left_over = decode_vector(request.left_over, "float32") if request.left_over else None
        vector = decode_vector(request.vector, "float32")
        trainer.load(request.group, request.version, request.steps, vector, left_over, request.carry)

    def _screen(self, trainer: LocalTrainer, request: Screen) -> dict[str, Any]:
        if not trainer.is_at(request.group, request.version):
            return {"loaded": False}
        update = np.float32(request.scale) * decode_vector(request.payload, request.dtype)
        windows = self._windows(request.windows)
        return {"loaded": True, "worse_by": trainer.screen(request.group, update, windows)}

    def _windows(self, count: int) -> torch.Tensor:
        if count not in self._held_out:
            assert self._trainer is not None
            text, window = self._trainer.text.held_out, self._trainer.run.model.window
            self._held_out[count] = held_out_windows(text, count, window)
        return self._held_out[count]

    def _train(self, trainer: LocalTrainer, request: Train) -> dict[str, Any]:
        deadline = time.monotonic() + request.seconds
        before: float | None = None

        def should_stop() -> bool:
            nonlocal before
            now = time.monotonic()
            if before is None:
                # One step is always made: a machine that once was slow must be able to find that it no
                # longer is. Whether there is time for a step at all is for the node to say.
                before = now
                return self._stopping.is_set()
            self._step_seconds = (self._step_seconds or now - before) * 0.8 + (now - before) * 0.2
            before = now
            return self._stopping.is_set() or now + self._step_seconds >= deadline

        outcome = trainer.train(request.max_steps, should_stop)
        return {
            "steps": outcome.steps,
            "tokens": outcome.tokens,
            "seconds": outcome.seconds,
            "upstream_seconds": outcome.upstream_seconds,
            "loss": None if math.isnan(outcome.loss) else outcome.loss,
            "step_seconds": None if math.isnan(outcome.step_seconds) else outcome.step_seconds,
        }


def read_requests(
    requests: queue.SimpleQueue[bytes | None], stopping: threading.Event, descriptor: int
) -> None:
    """Hand on the frames that arrive at ``descriptor``, and None at its end.

    On a thread of its own, so that the end of the parent is noticed in the middle of training.
    """
    decoder = FrameDecoder(FRAME_LIMIT)
    try:
        while data := os.read(descriptor, READ_BYTES):
            for body in decoder.feed(data):
                requests.put(body)
                if is_stop(body):
                    return
    except (OSError, WireError) as error:
        log.error("trainer.input_failed", cause=str(error))
    finally:
        stopping.set()
        requests.put(None)


def is_stop(body: bytes) -> bool:
    """Whether a frame's body asks to stop."""
    try:
        return len(body) < 64 and isinstance(parse_request(decode(body)), Stop)
    except WireError:
        return False


def serve(replies: BinaryIO, descriptor: int = 0) -> None:
    """Answer requests until there are no more."""
    stopping = threading.Event()
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(
        target=read_requests, args=(requests, stopping, descriptor), name="requests", daemon=True
    ).start()
    service = TrainerService(stopping)
    while (body := requests.get()) is not None and not is_stop(body):
        try:
            reply = encode({"ok": True, **service.answer(parse_request(decode(body)))})
        except Exception as error:  # whatever it was, the node decides what becomes of this process
            if not isinstance(error, SpheroidError):  # those the node raises again, for its user
                log.warning("trainer.request_failed", cause=str(error), kind=type(error).__name__)
            reply = encode(failure(error))
        try:
            write_all(replies, reply)
        except BrokenPipeError:
            return


def write_all(replies: BinaryIO, frame: bytes) -> None:
    """Write a whole frame to an unbuffered stream, which takes as much at a time as it likes."""
    rest = memoryview(frame)
    while rest:
        rest = rest[replies.write(rest) :]


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent, on Linux; elsewhere the end of stdin must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the node decides
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print, also of a library in C, must not end up between replies
    sys.stdout = sys.stderr
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    serve(replies)


if __name__ == "__main__":
    main()
