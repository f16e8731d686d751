"""A stream reader for frames of a megabyte, as a version or an update is cut into."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

BUFFER_BYTES = 1024 * 1024
SMALL_BYTES = 4096
"""A piece below this joins the one before: a hundred bytes are kept beside every piece."""
JOINED_BYTES = 65_536


class FrameReader(asyncio.StreamReader):
    """Keeps what comes in the pieces it came in, and joins them once, when a frame is whole.

    asyncio's own reader appends every piece to one buffer and cuts frames from its front: moving the bytes
    about takes as long as decrypting them. Only :meth:`readexactly` reads.
    """

    def __init__(self, limit: int = BUFFER_BYTES) -> None:
        """Beyond twice the ``limit`` of unread bytes the other side has to wait."""
        super().__init__(limit=limit)
        self._most = 2 * limit
        self._pieces: deque[bytes | bytearray | memoryview] = deque()
        self._size = 0
        self._ended = False
        self._is_held = False
        self._wanted = 0
        self._arrival: asyncio.Future[None] | None = None
        self._source: asyncio.ReadTransport | None = None

    # --- what the protocol calls ---

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        super().set_transport(transport)
        self._source = cast(asyncio.ReadTransport, transport)  # uvloop's have no such class

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # it is bytes
        last = self._pieces[-1] if self._pieces else b""
        if len(data) >= SMALL_BYTES:
            self._pieces.append(data)
        elif isinstance(last, bytearray) and len(last) < JOINED_BYTES:
            last += data
        else:
            self._pieces.append(bytearray(data))
        self._size += len(data)
        if self._size >= self._wanted:
            self._arrived()
        if self._size > max(self._most, self._wanted) and not self._is_held:
            self._hold(True)

    def feed_eof(self) -> None:
        super().feed_eof()
        self._ended = True
        self._arrived()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._arrived()

    def at_eof(self) -> bool:
        return self._ended and not self._size

    # --- what a link calls ---

    async def readexactly(self, n: int) -> bytes:
        """The next ``n`` bytes; broken off, reading may go on and nothing is lost.

        Raises :class:`asyncio.IncompleteReadError` at the end, and what broke the connection.
        """
        while (failure := self.exception()) is None and self._size < n and not self._ended:
            self._wanted, self._arrival = n, asyncio.get_running_loop().create_future()
            self._hold(False)
            try:
                await self._arrival
            finally:
                self._wanted, self._arrival = 0, None
        if failure is not None:
            raise failure
        if self._size < n:
            raise asyncio.IncompleteReadError(self._take(self._size), n)
        taken = self._take(n)
        if self._size <= self._most // 2:
            self._hold(False)
        return taken

    def _take(self, count: int) -> bytes:
        taken = []
        self._size -= count
        while count:
            piece = self._pieces.popleft()
            if len(piece) > count:
                piece = memoryview(piece)
                self._pieces.appendleft(piece[count:])
                piece = piece[:count]
            taken.append(piece)
            count -= len(piece)
        return b"".join(taken)

    def _arrived(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _hold(self, is_held: bool) -> None:
        """Have the other side wait, or go on."""
        if is_held == self._is_held or self._source is None:
            return
        self._is_held = is_held
        if is_held:
            self._source.pause_reading()
        else:
            self._source.resume_reading()
