"""What one peer may ask of a node in a time. Past it the node reads more slowly; nobody is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from spheroid_node.wire.tensors import CHUNK_BYTES

MAX_KEPT = 1024
"""Peers whose use is remembered although they have no link; of those who owe nothing, none is."""


class Rates(NamedTuple):
    """Amounts that all links of a peer together may move at once, and a second from then on."""

    requests: float = 5000.0
    requests_per_second: float = 500.0
    """Requests are messages that come from the peer."""
    bytes: float = 4e9
    bytes_per_second: float = 100e6
    """Both ways."""

    @classmethod
    def for_versions(cls, held_bytes: int, period: float) -> Rates:
        """For who may take twice ``held_bytes``, all that a node holds, at once and again in every round."""
        most = 2.0 * held_bytes + 256e6
        chunks = most / CHUNK_BYTES
        return cls(2 * chunks + 2000, (2 * chunks + 2000) / period, most, most / period)


class Allowance:
    """The use that one peer has made. It falls with time; above the rates' first amounts it has to wait."""

    def __init__(self, rates: Rates, clock: Callable[[], float]) -> None:
        self._rates = rates
        self._clock = clock
        self._seen = clock()
        self._requests = 0.0
        self._bytes = 0.0

    def use(self, requests: int, size: int) -> None:
        self._forget()
        self._requests += requests
        self._bytes += size

    def owed(self) -> float:
        """Seconds until the peer may ask again."""
        self._forget()
        return max(
            0.0,
            (self._requests - self._rates.requests) / self._rates.requests_per_second,
            (self._bytes - self._rates.bytes) / self._rates.bytes_per_second,
        )

    @property
    def is_unused(self) -> bool:
        self._forget()
        return not self._requests and not self._bytes

    async def wait(self) -> None:
        """Until nothing is owed. Broken off, it loses nothing."""
        while seconds := self.owed():  # it grows while the peer's other links go on  # noqa: ASYNC110
            await asyncio.sleep(min(seconds, 1.0) + 0.001)

    def _forget(self) -> None:
        now = self._clock()
        passed, self._seen = now - self._seen, now
        self._requests = max(0.0, self._requests - passed * self._rates.requests_per_second)
        self._bytes = max(0.0, self._bytes - passed * self._rates.bytes_per_second)


class Allowances:
    """One :class:`Allowance` a peer, which a new connection does not renew."""

    def __init__(self, rates: Rates, clock: Callable[[], float]) -> None:
        self._rates = rates
        self._clock = clock
        self._of: dict[str, Allowance] = {}

    def of(self, peer: str) -> Allowance:
        if len(self._of) >= MAX_KEPT:
            self._of = {name: used for name, used in self._of.items() if not used.is_unused}
        return self._of.setdefault(peer, Allowance(self._rates, self._clock))
