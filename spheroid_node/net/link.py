"""One connection between two nodes: framed messages, counted and limited (protocols/link.md)."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from spheroid_node.net.limits import Allowance
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import HEADER, MAX_FRAME, frame_length
from spheroid_node.wire.messages import Error, Message, Via, decode

SEND_TIMEOUT = 60.0
CLOSE_TIMEOUT = 2.0
M = TypeVar("M", bound=Message)


class LinkClosed(ConnectionError):
    """The other side ended the connection, or it broke."""


@dataclass
class Traffic:
    """Bytes of frames that a node has received and sent."""

    received: int = 0
    sent: int = 0


class Link:
    """One connection to ``peer``, whose identity is proven.

    ``via`` says how it travels. ``proven`` is the peer whose key TLS or libp2p has proven; None at a server
    over TCP, as TLS clients show no certificate.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        traffic: Traffic,
        *,
        via: Via = "tcp",
        proven: str | None = None,
    ) -> None:
        self.peer = peer
        self.via = via
        self.proven = proven
        self.allowance: Allowance | None = None
        """What the peer may ask of us; None where that is not limited."""
        self._reader = reader
        self._writer = writer
        self._traffic = traffic
        self._closed = False
        self._length: int | None = None  # of the frame whose header has been read

    async def send(self, message: Message, timeout: float = SEND_TIMEOUT) -> None:
        """Send ``message``. Raises :class:`WireError` (too-large), :class:`LinkClosed`, TimeoutError."""
        await self.send_body(message.pack(), timeout)

    async def send_body(self, body: bytes, timeout: float = SEND_TIMEOUT) -> None:
        """Send a message that is packed already. Raises as :meth:`send`."""
        if len(body) > MAX_FRAME:
            raise WireError(ErrorCode.TOO_LARGE, f"frame of {len(body)} bytes, limit {MAX_FRAME}")
        if self._writer.is_closing():
            raise LinkClosed(f"the link to {self.peer} is closed")
        self._traffic.sent += HEADER.size + len(body)
        if self.allowance is not None:
            self.allowance.use(0, len(body))
        try:
            self._writer.write(HEADER.pack(len(body)) + body)
            if self._writer.transport.get_write_buffer_size():  # else nothing can be waited for
                async with asyncio.timeout(timeout):
                    await self._writer.drain()
        except TimeoutError:
            raise
        except (OSError, RuntimeError) as error:  # uvloop: RuntimeError on a transport that just closed
            raise LinkClosed(f"{self.peer}: {error}") from error

    async def receive(self, timeout: float | None = None) -> Message:
        """The next message. After a TimeoutError the link is still good, and receiving may go on.

        Raises :class:`WireError` for what is no message, :class:`LinkClosed`, TimeoutError.
        """
        if timeout is None:
            return decode(await self.receive_body())
        async with asyncio.timeout(timeout):
            body = await self.receive_body()
        return decode(body)

    async def receive_body(self) -> bytes:
        """The next message as it came. Raises as :meth:`receive`; broken off, receiving may go on."""
        if self.allowance is not None:
            await self.allowance.wait()
        try:
            if self._length is None:
                self._length = frame_length(await self._reader.readexactly(HEADER.size))
            body = await self._reader.readexactly(self._length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkClosed(f"{self.peer} closed the connection") from error
        self._traffic.received += HEADER.size + self._length
        if self.allowance is not None:
            self.allowance.use(1, self._length)
        self._length = None
        return body

    async def expect(self, kind: type[M], timeout: float | None = None) -> M:
        """The next message, which must be a ``kind``.

        Raises as :meth:`receive`; also :class:`WireError` with the peer's own code when it sends an Error,
        and (unexpected) for any other message.
        """
        message = await self.receive(timeout)
        if isinstance(message, kind):
            return message
        if isinstance(message, Error):
            raise WireError(message.code, message.detail)
        raise WireError(ErrorCode.UNEXPECTED, f"{type(message).__name__} instead of {kind.__name__}")

    async def fail(self, error: WireError) -> None:
        """Tell the peer why, if it still listens, and close."""
        with suppress(OSError, WireError):
            await self.send(Error(code=error.code, detail=error.detail[:512]), timeout=CLOSE_TIMEOUT)
        await self.close()

    async def close(self) -> None:
        """Close within CLOSE_TIMEOUT, whatever the peer does. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True  # a second wait on the same transport would meet the first one's cancellation
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._writer.wait_closed()
        except (OSError, ssl.SSLError):  # TimeoutError is an OSError
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the connection at once."""
        self._writer.transport.abort()
