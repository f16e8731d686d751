"""What serving asks of the network, so that a test can put memory in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from spheroid_node.wire.messages import HopAddress, Message, Via
from spheroid_node.wire.records import NodeRecord


class Connection(Protocol):
    """A connection to an authenticated peer. After it is gone, both calls raise an :class:`OSError`."""

    @property
    def peer(self) -> str: ...

    @property
    def via(self) -> Via:
        """How it travels."""
        ...

    async def send(self, message: Message, timeout: float = ...) -> None: ...

    async def receive(self, timeout: float | None = None) -> Message: ...

    async def close(self) -> None: ...


Dial = Callable[[HopAddress], Awaitable[Connection]]
"""Opens a connection for the hop service. Raises :class:`OSError` or :class:`WireError`."""


class NodeDirectory(Protocol):
    """Where the live replicas of a block are found."""

    async def nodes(self, block: int) -> dict[str, NodeRecord]: ...


Measure = Callable[[Iterable[HopAddress]], Awaitable[dict[str, float]]]
"""Seconds that a message takes to these nodes, one way, by peer; who does not answer is left out."""
