"""Sessions of a hop: one client's text, its caches, its connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from spheroid_node.model.block import BlockCache
from spheroid_node.model.composed import Hop
from spheroid_node.serving.ports import Connection
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Open, State, Step


@dataclass(frozen=True)
class Limits:
    """What one hop grants; beyond these it answers with an error instead of growing."""

    sessions: int = 32
    idle_seconds: float = 120.0
    """A session that hears nothing for so long is ended."""
    positions: int = 16_384
    """Length of a session's text, which its caches grow with."""
    waiting: int = 64
    """Steps of a session that wait for their turn."""
    dial_seconds: float = 10.0


@dataclass(eq=False)
class Session:
    """A chain's state at this hop. Only its task uses ``hop`` and ``cache``, and sets them first of all."""

    opening: Open
    client: Connection
    hop: Hop = field(init=False)
    cache: BlockCache = field(init=False)
    inbox: asyncio.Queue[Step | State | WireError] = field(default_factory=asyncio.Queue)
    """Work in the order of arrival, or what ends the session."""
    upstream: Connection | None = None
    """Where states come from: the newest connection that attached, so that a lost hop can be replaced."""
    onward: Connection | None = None
    """Where states go to; None at the last hop."""
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> bytes:
        return self.opening.session

    def put(self, work: Step | State, waiting: int) -> None:
        """Queue ``work``; a peer that sends more than ``waiting`` ahead ends its session."""
        if self.inbox.qsize() >= waiting:
            self.end(ErrorCode.TOO_LARGE, f"more than {waiting} steps ahead")
        else:
            self.inbox.put_nowait(work)

    def end(self, code: ErrorCode, detail: str = "") -> None:
        """Let the session end with an error, after the work that came before it."""
        self.inbox.put_nowait(WireError(code, detail))


class SessionTable:
    """The open sessions of a hop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """Raise :class:`WireError` at the limit (busy) or for a name in use (unexpected)."""
        if session.id in self._sessions:
            raise WireError(ErrorCode.UNEXPECTED, "a session of this name is open")
        if len(self._sessions) >= self._limit:
            raise WireError(ErrorCode.BUSY, f"{self._limit} sessions are open here")
        self._sessions[session.id] = session

    def get(self, name: bytes) -> Session:
        """Raise :class:`WireError` (not-found) for a session that is not open."""
        session = self._sessions.get(name)
        if session is None:
            raise WireError(ErrorCode.NOT_FOUND, "no such session")
        return session

    def owned(self, name: bytes, client: Connection) -> Session:
        """The session ``name`` if ``client`` opened it; to anyone else it does not exist."""
        session = self.get(name)
        if session.client is not client:
            raise WireError(ErrorCode.NOT_FOUND, "no such session")
        return session

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def all(self) -> list[Session]:
        return list(self._sessions.values())
