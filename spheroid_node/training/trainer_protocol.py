"""What a node and its trainer process say to each other: frames of msgpack maps over stdin and stdout.

A request is ``{"do": name, **fields}`` of one of the classes below; every request gets exactly one reply, in
order. A reply is ``{"ok": True, **fields}`` or what :func:`failure` makes of an error. Both ends belong to
one node and trust each other, so frames may be as large as a parameter vector. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgpack
from pydantic import Field

from spheroid_node import errors
from spheroid_node.errors import SpheroidError, TrainerFailed
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import encode_frame
from spheroid_node.wire.messages import Count, Finite, Group, Message

FRAME_LIMIT: Final = 4 * 10**9 + 2**20
"""Bytes of a frame: two vectors of a group of up to 500 million parameters in float32."""

MODULE = "spheroid_node.training.process"
"""``python -m`` this starts a trainer."""


class Configure(Message):
    """Load the text and build the trainer.

    Reply: device, precision, train_bytes, held_out_bytes, eval_windows, drawn, and copied_bytes: what the
    frozen copies of other blocks take up.

    Errors in it are the user's (data, device, block) and are raised again by :func:`error_of`.
    """

    run: bytes
    """Packed RunSpec."""
    block: Count
    device: str
    precision: str = "auto"
    compiled: bool = False
    data: list[str]
    held_out: list[str]
    worker_seed: Count
    threads: Annotated[int, Field(gt=0)]
    state: str
    """File of the optimiser's state: read if it is there, written by :class:`Save`."""


class Load(Message):
    """Set a group to a version; ``steps`` are the group's so far, vectors are float32.

    A group that is trained begins with ``left_over`` on top if there is any, and with ``carry`` with what was
    learnt since the last :class:`Take`.
    """

    group: Group
    version: Count
    steps: Count
    vector: bytes
    left_over: bytes = b""
    carry: bool = False


class Train(Message):
    """Train up to ``max_steps`` steps within ``seconds`` from now.

    Reply: steps, tokens, seconds, upstream_seconds (of them, in the frozen blocks upstream), loss and
    step_seconds (both None without a step).
    """

    max_steps: Count
    seconds: Finite


class Take(Message):
    """Take the updates of all trained groups; the next ones are measured from here.

    Reply: of each group what it has learnt since it was loaded, or taken, last (``updates``, float32).
    """


class Evaluate(Message):
    """Measure the versions that are loaded.

    Reply: ce, from-noise cross-entropy on ``windows`` held-out windows after every block held.
    """

    windows: Annotated[int, Field(gt=0)]


class Screen(Message):
    """Try out an update of ``version`` of a group: ``scale`` times what the payload holds.

    Reply: loaded, whether that version is loaded and trained here, and if so worse_by: the growth of the own
    block's from-noise cross-entropy on ``windows`` held-out windows, see :meth:`LocalTrainer.screen`.
    """

    group: Group
    version: Count
    payload: bytes
    dtype: str
    scale: Finite
    windows: Annotated[int, Field(gt=0)]


class Save(Message):
    """Write the optimiser's state."""


class Stop(Message):
    """End training under way and leave with exit code 0, without a reply."""


REQUESTS: Final[dict[str, type[Message]]] = {
    "configure": Configure,
    "load": Load,
    "train": Train,
    "take": Take,
    "evaluate": Evaluate,
    "screen": Screen,
    "save": Save,
    "stop": Stop,
}
_NAMES: Final = {kind: name for name, kind in REQUESTS.items()}


def encode_request(request: Message) -> bytes:
    """The frame of a request."""
    return encode({"do": _NAMES[type(request)], **request.fields()})


def encode(fields: dict[str, Any]) -> bytes:
    """The frame of a reply. Raises :class:`WireError` (too-large)."""
    return encode_frame(fields, FRAME_LIMIT)


def decode(body: bytes) -> dict[str, Any]:
    """The map in a frame's body. Raises :class:`WireError` (malformed)."""
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises a dozen unrelated types on bad input
        raise WireError(ErrorCode.MALFORMED, f"not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise WireError(ErrorCode.MALFORMED, "not a map")
    return fields


def parse_request(fields: dict[str, Any]) -> Message:
    """The request in ``fields``. Raises :class:`WireError` (malformed)."""
    name = fields.get("do")
    if not isinstance(name, str) or name not in REQUESTS:
        raise WireError(ErrorCode.MALFORMED, f"no request is called {name!r}")
    return REQUESTS[name].parse({key: value for key, value in fields.items() if key != "do"})


def failure(error: Exception) -> dict[str, Any]:
    """The reply that carries ``error``."""
    reply = {"error": str(error) or type(error).__name__, "kind": type(error).__name__, "exit_code": 1}
    if isinstance(error, SpheroidError):
        reply |= {"exit_code": error.exit_code, "problem": error.problem, "remedy": error.remedy}
    return reply


def error_of(reply: dict[str, Any]) -> SpheroidError | None:
    """The error that a reply carries, of its own class if it is a user's; None for a good reply."""
    if "error" not in reply:
        return None
    kind = getattr(errors, str(reply.get("kind")), None)
    if not (
        isinstance(kind, type) and issubclass(kind, SpheroidError) and {"problem", "remedy"} <= reply.keys()
    ):
        return TrainerFailed(f"{reply.get('kind')}: {reply['error']}")
    error = kind.__new__(kind)
    SpheroidError.__init__(error, str(reply["problem"]), str(reply["remedy"]))
    return error
