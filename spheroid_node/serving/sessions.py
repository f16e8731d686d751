"""Sessions of a hop: one client's text, its cache, its connections; and what a hop grants to whom."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from spheroid_node.model.cache import BlockCache
from spheroid_node.model.composed import Hop
from spheroid_node.serving.judging import Judge
from spheroid_node.serving.ports import Connection
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Open, Result, State, Step, Write

MAX_RESULTS = 1024
"""That wait at block 0; it reads one as soon as it comes, so a hop that sends so many is not of good will."""

Asked = Step | State | Write


@dataclass(frozen=True)
class Limits:
    """What one hop grants; beyond these it answers with an error instead of growing."""

    sessions: int = 256
    cache_bytes: int = 1 << 30
    """Of key/value caches, all sessions together."""
    idle_seconds: float = 120.0
    """A session that hears nothing for so long is ended."""
    positions: int = 65_536
    """Length of a session's text. Its cache does not grow with it beyond a few windows."""
    waiting: int = 64
    """Messages of a session that wait for their turn; after that the connection they come on is not read."""
    dial_seconds: float = 10.0


class Inbox:
    """Work of a session in the order of arrival, or what ends the session."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Asked | WireError] = deque()
        self._filled, self._emptied, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ending: WireError | None = None
        self._closed = False

    async def put(self, work: Asked) -> None:
        """Wait for room: whoever sends faster than is computed is slowed down by its own connection."""
        if isinstance(work, State) and work.line >= 0:
            self._drop_superseded(work)
        while len(self._items) >= self._limit and not self._closed:
            self._emptied.clear()
            await self._emptied.wait()
        self._items.append(work)
        self._filled.set()

    def close(self) -> None:
        """Nobody takes anything any more, and nobody need wait to put it."""
        self._closed = True
        self._emptied.set()

    def end(self, error: WireError) -> None:
        """After the work that came before it."""
        self._ending = self._ending or error
        self._items.append(error)
        self._filled.set()
        self._ended.set()

    async def get(self) -> Asked:
        """Raises what was given to :meth:`end`."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        item = self._items.popleft()
        self._emptied.set()
        if isinstance(item, WireError):
            raise item
        return item

    async def failure(self) -> WireError:
        """What ends the session, as soon as it is known and whatever work comes before it."""
        await self._ended.wait()
        assert self._ending is not None
        return self._ending

    def _drop_superseded(self, newest: State) -> None:
        """A line of drafts that begins anew makes waiting ones past its beginning pointless."""
        kept = [
            item
            for item in self._items
            if not isinstance(item, State)
            or not 0 <= item.line < newest.line
            or item.position < newest.position
        ]
        self._items = deque(kept)


@dataclass(eq=False)
class Session:
    """A chain's state at this hop. Only its task uses ``hop`` and ``cache``, and sets them first of all."""

    opening: Open
    client: Connection
    inbox: Inbox
    hop: Hop = field(init=False)
    cache: BlockCache | None = None
    judge: Judge = field(default_factory=Judge)
    """At the last hop: which drafts hold."""
    results: asyncio.Queue[Result] = field(default_factory=lambda: asyncio.Queue(MAX_RESULTS))
    """At block 0, where it writes: what the last hop decided."""
    upstream: Connection | None = None
    """Where states come from: the newest connection that attached, so that a lost hop can be replaced."""
    onward: Connection | None = None
    """Where states go to; None at the last hop."""
    reader: Connection | None = None
    """At the last hop: the connection on which block 0 reads the results."""
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> bytes:
        return self.opening.session


class SessionTable:
    """The open sessions of a hop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> Session | None:
        """The session that has to go for it, if any. Raises :class:`WireError` (busy, unexpected).

        When a hop is full, a client with fewer sessions than another takes the place of that one's newest.
        """
        if session.id in self._sessions:
            raise WireError(ErrorCode.UNEXPECTED, "a session of this name is open")
        displaced = None
        if len(self._sessions) >= self._limits.sessions or self._cached() >= self._limits.cache_bytes:
            displaced = self._of_the_greediest(session.client.peer)
            if displaced is None:
                raise WireError(ErrorCode.BUSY, f"{len(self._sessions)} sessions are open here")
            self.remove(displaced)
        self._sessions[session.id] = session
        return displaced

    def over_limit(self) -> Session | None:
        """What has to go when caches have outgrown the limit: the newest session of the greediest client."""
        if self._cached() <= self._limits.cache_bytes:
            return None
        held = Counter[str]()
        for session in self._sessions.values():
            held[session.client.peer] += session.cache.bytes if session.cache else 0
        return self._newest_of(held.most_common(1)[0][0])

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

    def _cached(self) -> int:
        return sum(session.cache.bytes for session in self._sessions.values() if session.cache)

    def _of_the_greediest(self, newcomer: str) -> Session | None:
        """The newest session of the client with most, if it has at least two more than ``newcomer``."""
        count = Counter(session.client.peer for session in self._sessions.values())
        if not count:
            return None
        greediest, most = count.most_common(1)[0]
        return self._newest_of(greediest) if most > count[newcomer] + 1 else None

    def _newest_of(self, peer: str) -> Session:
        return next(session for session in reversed(self.all()) if session.client.peer == peer)
