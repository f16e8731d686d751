"""The hop service: one block of many chains (protocols/hop.md).

Each session has a task of its own, so that a session which ends, for whatever reason, ends alone. A session
belongs to the connection that opened it and ends with it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog

from spheroid_node.model.composed import Hop
from spheroid_node.run import RunSpec
from spheroid_node.serving.compute import compute_step
from spheroid_node.serving.ports import Connection, Dial
from spheroid_node.serving.sessions import Limits, Session, SessionTable
from spheroid_node.serving.steps import Piece, check, positions_per_step
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import (
    Attach,
    Attached,
    Close,
    Error,
    HopAddress,
    Open,
    Opened,
    Result,
    State,
    Step,
)

log = structlog.get_logger()


class ModelSource(Protocol):
    """The versions that this node can serve. Called in the worker thread."""

    def hop_model(self, block_version: int, interface_version: int) -> Hop | None:
        """The hop at exactly these versions, ready for inference, or None if one of them is gone."""
        ...


class HopService:
    """Serves ``block``. :meth:`handle` is the service ``hop`` of a link server.

    Torch runs in ``executor``, one worker thread that all sessions share, so that the event loop never waits.
    """

    def __init__(
        self,
        run: RunSpec,
        block: int,
        models: ModelSource,
        dial: Dial,
        executor: Executor,
        limits: Limits | None = None,
    ) -> None:
        self._run, self._block, self._models, self._dial = run, block, models, dial
        self._executor, self._limits = executor, limits or Limits()
        self._step_limit = positions_per_step(run)
        self._sessions = SessionTable(self._limits.sessions)
        self._recent: deque[float] = deque(maxlen=64)
        self._leaving = False

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return len(self._sessions)

    @property
    def hop_seconds(self) -> float:
        """Median compute time of the last single-position steps; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    async def stop(self) -> None:
        """End every session, tell its client, and accept no more."""
        self._leaving = True
        tasks = [session.task for session in self._sessions.all() if session.task is not None]
        for session in self._sessions.all():
            session.end(ErrorCode.LEAVING)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=self._limits.dial_seconds / 2)
            for task in stuck:
                task.cancel()

    # --- messages of a connection -------------------------------------------------------------------

    async def handle(self, link: Connection) -> None:
        """Serve one connection, of a client or of the hop before. Raises :class:`WireError` and OSError."""
        try:
            # A connection that never asks for anything is not kept; one with sessions ends with them.
            message = await link.receive(self._limits.idle_seconds)
            while not isinstance(message, Error):
                if not isinstance(message, Open | Attach | Step | State | Close):
                    raise WireError(ErrorCode.UNEXPECTED, "a message that is not for a hop")
                try:
                    await self._dispatch(link, message)
                except WireError as error:
                    await link.send(_error(message.session, error))
                message = await link.receive()
        finally:
            for session in self._sessions.all():
                if session.client is link:
                    self._cancel(session)
                elif session.upstream is link:
                    session.upstream = None  # the client knows too, and may have another hop attach

    async def _dispatch(self, link: Connection, message: Open | Attach | Step | State | Close) -> None:
        if isinstance(message, Open):
            self._open(link, message)
        elif isinstance(message, Attach):
            await self._attach(link, message)
        elif isinstance(message, Close):
            self._cancel(self._sessions.owned(message.session, link))
        else:
            self._work(link, message)

    def _open(self, link: Connection, message: Open) -> None:
        if self._leaving:
            raise WireError(ErrorCode.LEAVING)
        if message.block != self._block:
            raise WireError(ErrorCode.NOT_FOUND, f"this peer serves block {self._block}")
        if (message.next is None) != (self._block == self._run.model.blocks - 1):
            raise WireError(ErrorCode.MALFORMED, "the last hop, and no other, has no next")
        session = Session(message, link)
        self._sessions.add(session)
        session.task = asyncio.create_task(self._live(session), name=f"session-{message.session.hex()[:8]}")

    async def _attach(self, link: Connection, message: Attach) -> None:
        session = self._sessions.get(message.session)
        if self._block == 0:
            raise WireError(ErrorCode.UNEXPECTED, "no hop is before block 0")
        session.upstream = link
        await link.send(Attached(session=message.session))

    def _work(self, link: Connection, message: Step | State) -> None:
        session = self._sessions.get(message.session)
        if link is session.client and (isinstance(message, State) or self._block > 0):
            session.end(ErrorCode.UNEXPECTED, "a client sends steps, to block 0")
        elif link is not (session.client if self._block == 0 else session.upstream):
            raise WireError(ErrorCode.NOT_FOUND, "no such session")
        elif isinstance(message, Step) and self._block > 0:
            session.end(ErrorCode.UNEXPECTED, "a hop sends states")
        else:
            session.put(message, self._limits.waiting)

    @staticmethod
    def _cancel(session: Session) -> None:
        if session.task is not None:
            session.task.cancel()

    # --- the life of a session ----------------------------------------------------------------------

    async def _live(self, session: Session) -> None:
        """From opening to end; whatever ends the session is told to its client."""
        watch: asyncio.Task[None] | None = None
        failure: WireError | None = None
        try:
            await self._load(session)
            if session.opening.next is not None:
                session.onward = await self._reach(session, session.opening.next)
                watch = asyncio.create_task(self._watch(session, session.onward))
            await self._send(session.client, Opened(session=session.id))
            while True:
                async with asyncio.timeout(self._limits.idle_seconds):
                    work = await session.inbox.get()
                if isinstance(work, WireError):
                    raise work
                await self._step(session, work)
        except WireError as error:
            failure = error
        except TimeoutError:
            failure = WireError(ErrorCode.TIMED_OUT, f"nothing heard for {self._limits.idle_seconds:g} s")
        except OSError:
            pass  # the client is gone
        except Exception:
            log.exception("session.failed", session=session.id.hex())
            failure = WireError(ErrorCode.INTERNAL)
        finally:
            self._sessions.remove(session)
            if watch is not None:
                watch.cancel()
            if failure is not None:  # before the neighbours notice and tell the client what they see of it
                await self._tell(session, failure)
            for link in (session.onward, session.upstream):
                if link is not None:
                    await link.close()

    async def _tell(self, session: Session, failure: WireError) -> None:
        log.info("session.ended", session=session.id.hex(), reason=str(failure))
        with suppress(OSError, WireError):
            async with asyncio.timeout(self._limits.dial_seconds):
                await session.client.send(_error(session.id, failure))

    async def _load(self, session: Session) -> None:
        """In the worker thread too, since a version may have to be built first."""
        opening = session.opening
        hop = await asyncio.get_running_loop().run_in_executor(
            self._executor, self._models.hop_model, opening.block_version, opening.interface_version
        )
        if hop is None:
            raise WireError(
                ErrorCode.VERSION_GONE,
                f"block {opening.block_version} with interface {opening.interface_version}",
            )
        session.hop, session.cache = hop, hop.block.new_cache()

    async def _reach(self, session: Session, address: HopAddress) -> Connection:
        """A connection to the next hop, attached to the session there. Raises :class:`WireError`."""
        link: Connection | None = None
        try:
            async with asyncio.timeout(self._limits.dial_seconds):
                link = await self._dial(address)
                await link.send(Attach(session=session.id))
                answer = await link.receive()
            if not isinstance(answer, Attached) or answer.session != session.id:
                reason = f"{answer.code} {answer.detail}" if isinstance(answer, Error) else "no answer"
                raise WireError(ErrorCode.NEXT_HOP_LOST, reason)
        except BaseException as error:
            if link is not None:
                await link.close()
            if isinstance(error, OSError | WireError):
                raise WireError(ErrorCode.NEXT_HOP_LOST, _short(error)) from error
            raise
        return link

    async def _watch(self, session: Session, onward: Connection) -> None:
        """The next hop has nothing to say, so whatever comes from it is its end."""
        reason = "it closed the session"
        try:
            await onward.receive()
        except (OSError, WireError) as error:
            reason = _short(error)
        session.end(ErrorCode.NEXT_HOP_LOST, reason)

    async def _step(self, session: Session, work: Step | State) -> None:
        piece = Piece(work.position, work.tokens, work.masked, work.decide)
        if piece.count > self._step_limit:
            raise WireError(ErrorCode.TOO_LARGE, f"{piece.count} positions, limit {self._step_limit}")
        check(piece, session.cache.length, self._limits.positions)
        compute = partial(compute_step, self._run, session, piece, work)
        message, seconds = await asyncio.get_running_loop().run_in_executor(self._executor, compute)
        if piece.count == 1:
            self._recent.append(seconds)
        if session.onward is None:
            await self._send(session.client, message)
            return
        try:
            await self._send(session.onward, message)
        except OSError as error:  # a TimeoutError is one
            raise WireError(ErrorCode.NEXT_HOP_LOST, _short(error)) from error

    async def _send(self, link: Connection, message: Opened | Error | State | Result) -> None:
        """A peer that does not read for as long as a session may be idle counts as gone."""
        async with asyncio.timeout(self._limits.idle_seconds):
            await link.send(message)


def _error(session: bytes, error: WireError) -> Error:
    return Error(session=session, code=error.code, detail=error.detail[:512])


def _short(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
