"""Frames on a stream, sans I/O: four bytes of big-endian length, then that many bytes of msgpack."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack

from spheroid_node.wire.codes import ErrorCode, WireError

HEADER = struct.Struct(">I")
MAX_FRAME = 4 * 1024 * 1024
"""Bytes of a frame's body; larger things travel in chunks."""

MAX_ITEMS = 1024
"""Entries of one array or map: room for it is made before they arrive, and once a level of nesting."""

MAX_CONTAINERS = 1024
"""Arrays and maps of one message: an empty one costs a byte on the wire and sixty in memory."""


def encode_frame(fields: dict[str, Any], limit: int = MAX_FRAME) -> bytes:
    """One frame. Raises :class:`WireError` (too-large) above ``limit``."""
    body = pack(fields)
    if len(body) > limit:
        raise WireError(ErrorCode.TOO_LARGE, f"frame of {len(body)} bytes, limit {limit}")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes, limit: int = MAX_FRAME) -> int:
    """Bytes of the body that follows ``header``, checked before anything is allocated for it."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= limit:
        raise WireError(ErrorCode.TOO_LARGE, f"frame of {length} bytes, limit {limit}")
    return int(length)


class FrameDecoder:
    """Collects bytes as they come and returns the bodies that are complete."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies completed by ``data``. Raises :class:`WireError` on a length above the limit."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + frame_length(bytes(self._buffer[: HEADER.size]), self._limit)
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
        return bodies


def pack(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Msgpack with single types for text and bytes, as all our protocols use it.

    ``default`` says what to pack in place of an object that msgpack does not know.
    """
    return bytes(msgpack.packb(value, use_bin_type=True, default=default))


def unpack(data: bytes) -> Any:
    """Msgpack of an untrusted peer. Raises :class:`WireError` (malformed) for anything else."""
    containers = 0

    def counted(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=65_536,
            max_bin_len=MAX_FRAME,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            list_hook=counted,
            object_hook=counted,
        )
    except Exception as error:  # msgpack raises a dozen unrelated types on bad input
        raise WireError(ErrorCode.MALFORMED, f"not msgpack: {error}") from error
