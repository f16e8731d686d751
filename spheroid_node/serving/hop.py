"""The hop service: one block of many chains (protocols/hop.md).

Each session has a task of its own, so that a session which ends, for whatever reason, ends alone. A session
belongs to the connection that opened it and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Protocol

import structlog

from spheroid_node.model.composed import Hop
from spheroid_node.run import RunSpec
from spheroid_node.serving.engine import Done, Engine, Work
from spheroid_node.serving.pace import Pace
from spheroid_node.serving.ports import Connection, Dial
from spheroid_node.serving.sessions import Inbox, Limits, Session, SessionTable
from spheroid_node.serving.states import piece_of
from spheroid_node.serving.steps import Piece, check, positions_per_step, split
from spheroid_node.serving.writing import Writer
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import (
    Attach,
    Attached,
    Close,
    Error,
    HopAddress,
    Message,
    Open,
    Opened,
    Result,
    State,
    Step,
    Write,
)
from spheroid_node.wire.tensors import pack_tensor

log = structlog.get_logger()

Request = Open | Attach | Step | Write | State | Close


class ModelSource(Protocol):
    """The versions that this node can serve. Called in the worker thread."""

    def hop_model(self, block_version: int, interface_version: int) -> Hop | None:
        """The hop at exactly these versions, as :func:`engine.for_serving` makes it; None if one is gone."""
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
        self._engine = Engine(run, block, executor)
        self._pace = Pace()
        self._step_limit = positions_per_step(run)
        self._sessions = SessionTable(self._limits)
        self._leaving = False

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return len(self._sessions)

    @property
    def hop_seconds(self) -> float:
        """Median compute time of the last single-position steps; 0 before the first."""
        return self._engine.position_seconds

    async def stop(self) -> None:
        """End every session, tell its client, and accept no more."""
        self._leaving = True
        tasks = [session.task for session in self._sessions.all() if session.task is not None]
        for session in self._sessions.all():
            session.inbox.end(WireError(ErrorCode.LEAVING))
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=self._limits.dial_seconds / 2)
            for task in stuck:
                task.cancel()

    # --- messages of a connection -------------------------------------------------------------------

    async def handle(self, link: Connection) -> None:
        """Serve one connection, of a client or of another hop. Raises :class:`WireError` and OSError."""
        try:
            # A connection that never asks for anything is not kept; one with sessions ends with them.
            message = await link.receive(self._limits.idle_seconds)
            while not isinstance(message, Error):
                if not isinstance(message, Request):
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
                elif session.reader is link:
                    session.reader = None

    async def _dispatch(self, link: Connection, message: Request) -> None:
        if isinstance(message, Open):
            await self._open(link, message)
        elif isinstance(message, Attach):
            await self._attach(link, message)
        elif isinstance(message, Close):
            self._cancel(self._sessions.owned(message.session, link))
        else:
            await self._work(link, message)

    async def _open(self, link: Connection, message: Open) -> None:
        first, last = self._block == 0, self._block == self._run.model.blocks - 1
        if self._leaving:
            raise WireError(ErrorCode.LEAVING)
        if message.block != self._block:
            raise WireError(ErrorCode.NOT_FOUND, f"this peer serves block {self._block}")
        if (message.next is None) != last:
            raise WireError(ErrorCode.MALFORMED, "the last hop, and no other, has no next")
        if message.last is not None and (last or not first):
            raise WireError(ErrorCode.MALFORMED, "block 0 of more than one, and no other, reads results")
        session = Session(message, link, Inbox(self._limits.waiting))
        displaced = self._sessions.add(session)
        session.task = asyncio.create_task(self._live(session), name=f"session-{message.session.hex()[:8]}")
        self._displace(displaced)

    @staticmethod
    def _displace(session: Session | None) -> None:
        if session is not None:
            session.inbox.end(WireError(ErrorCode.BUSY, "this hop is full, and others have less of it"))

    async def _attach(self, link: Connection, message: Attach) -> None:
        session = self._sessions.get(message.session)
        if message.role == "results":
            if session.opening.next is not None:
                raise WireError(ErrorCode.UNEXPECTED, "results are read from the last hop")
            session.reader = link
        elif self._block == 0:
            raise WireError(ErrorCode.UNEXPECTED, "no hop is before block 0")
        else:
            session.upstream = link
        await link.send(Attached(session=message.session))

    async def _work(self, link: Connection, message: Step | Write | State) -> None:
        session = self._sessions.get(message.session)
        if link is session.client and (isinstance(message, State) or self._block > 0):
            session.inbox.end(WireError(ErrorCode.UNEXPECTED, "a client sends steps, to block 0"))
        elif link is not (session.client if self._block == 0 else session.upstream):
            raise WireError(ErrorCode.NOT_FOUND, "no such session")
        elif not isinstance(message, State) and self._block > 0:
            session.inbox.end(WireError(ErrorCode.UNEXPECTED, "a hop sends states"))
        else:
            await session.inbox.put(message)

    @staticmethod
    def _cancel(session: Session) -> None:
        if session.task is not None:
            session.task.cancel()

    # --- the life of a session ----------------------------------------------------------------------

    async def _live(self, session: Session) -> None:
        """From opening to end; whatever ends the session is told to its client."""
        failure: WireError | None = None
        links: list[Connection] = []
        watches: list[asyncio.Task[None]] = []
        try:
            await self._load(session)
            await self._join(session, links, watches)
            via = session.onward.via if session.onward is not None else None
            await self._send(session, Opened(session=session.id, via=via))
            while True:
                async with asyncio.timeout(self._limits.idle_seconds):
                    work = await session.inbox.get()
                if isinstance(work, Write):
                    await self._write(session, work)
                else:
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
            session.inbox.close()
            for watch in watches:
                watch.cancel()
            if failure is not None:  # before the neighbours notice and tell the client what they see of it
                await self._tell(session, failure)
            for link in (*links, session.upstream, session.reader):
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

    async def _join(
        self, session: Session, links: list[Connection], watches: list[asyncio.Task[None]]
    ) -> None:
        """Connect to the next hop, and, where the session is to write, to the last one for its results."""
        opening = session.opening
        if opening.next is not None:
            session.onward = await self._reach(session, opening.next, "states")
            links.append(session.onward)
            watches.append(asyncio.create_task(self._watch(session, session.onward)))
        if opening.last is not None:
            results = await self._reach(session, opening.last, "results")
            links.append(results)
            watches.append(asyncio.create_task(self._watch(session, results)))

    async def _reach(self, session: Session, address: HopAddress, role: Any) -> Connection:
        """A connection to another hop, attached to the session there. Raises :class:`WireError`."""
        lost = ErrorCode.NEXT_HOP_LOST if role == "states" else ErrorCode.LAST_HOP_LOST
        link: Connection | None = None
        try:
            async with asyncio.timeout(self._limits.dial_seconds):
                link = await self._dial(address)
                await link.send(Attach(session=session.id, role=role))
                answer = await link.receive()
            if not isinstance(answer, Attached) or answer.session != session.id:
                reason = f"{answer.code} {answer.detail}" if isinstance(answer, Error) else "no answer"
                raise WireError(lost, reason)
        except BaseException as error:
            if link is not None:
                await link.close()
            if isinstance(error, OSError | WireError):
                raise WireError(lost, _short(error)) from error
            raise
        return link

    async def _watch(self, session: Session, link: Connection) -> None:
        """Take the results that come to block 0. Anything else that another hop sends is its end."""
        lost = ErrorCode.NEXT_HOP_LOST if link is session.onward else ErrorCode.LAST_HOP_LOST
        reason = "it closed the session"
        try:
            while isinstance(message := await link.receive(), Result) and link is not session.onward:
                if message.session != session.id or session.results.full():
                    break
                session.results.put_nowait(message)
        except (OSError, WireError) as error:
            reason = _short(error)
        session.inbox.end(WireError(lost, reason))

    # --- work ---------------------------------------------------------------------------------------

    async def _step(self, session: Session, work: Step | State) -> None:
        piece = piece_of(work) if isinstance(work, State) else _piece(work)
        if piece.count > self._step_limit:
            raise WireError(ErrorCode.TOO_LARGE, f"{piece.count} positions, limit {self._step_limit}")
        if piece.line >= 0 and (piece.masked or piece.decide not in (0, piece.count)):
            raise WireError(ErrorCode.MALFORMED, "drafts are bytes, and all of them are judged, or none")
        last = session.opening.next is None
        if last and not session.judge.due(piece):
            return
        done = await self._compute(session, piece, work if isinstance(work, State) else None)
        if done.onward is not None:
            await self._pass_on(session, done.onward)
        elif piece.decide:
            await self._answer(session, piece, done)

    async def _compute(
        self, session: Session, piece: Piece, incoming: State | None, drafts: bool = False
    ) -> Done:
        assert session.cache is not None
        check(piece, session.cache.length, self._limits.positions)
        work = Work(session.opening, session.hop, session.cache, piece, incoming, drafts)
        done = await self._engine.run(work)
        self._displace(self._sessions.over_limit())
        return done

    async def _pass_on(self, session: Session, state: State) -> None:
        assert session.onward is not None
        try:
            await session.onward.send(state, self._limits.idle_seconds)
        except OSError as error:  # a TimeoutError is one
            raise WireError(ErrorCode.NEXT_HOP_LOST, _short(error)) from error

    async def _answer(self, session: Session, piece: Piece, done: Done) -> None:
        """Tell the client, and block 0 where it writes, what is final after ``piece``."""
        final = session.judge.judge(piece, done.decided)
        log_probs_NV = done.log_probs_NV
        result = Result(
            session=session.id,
            position=piece.first_decided,
            tokens=final,
            line=piece.line,
            logits=None if log_probs_NV is None else pack_tensor(log_probs_NV[: len(final)].numpy()),
            seconds=[*done.seconds],
        )
        if session.reader is not None:
            with suppress(OSError):  # the client learns of its end from block 0 itself
                await session.reader.send(
                    result.model_copy(update={"logits": None}), self._limits.idle_seconds
                )
        await self._send(session, result)

    async def _write(self, session: Session, asked: Write) -> None:
        if session.opening.next is None:
            await _unless_ended(session, self._write_alone(session, asked))
            return
        if session.opening.last is None:
            raise WireError(ErrorCode.UNEXPECTED, "the session was opened without a way for the results")
        while not session.results.empty():  # of steps before
            session.results.get_nowait()
        writer = Writer(
            asked,
            lambda piece: self._compute(session, piece, None, drafts=True),
            lambda state: self._pass_on(session, state),
            session.results,
            self._pace,
            step_limit=self._step_limit,
            patience=self._limits.idle_seconds,
        )
        await _unless_ended(session, writer.run())

    async def _write_alone(self, session: Session, asked: Write) -> None:
        """A chain of one hop has nobody to ask."""
        for piece in split(Piece(asked.position, asked.tokens), self._step_limit):
            done = await self._compute(session, piece, None)
        await self._answer(session, piece, done)
        for _ in range(asked.count - 1):
            piece = Piece(piece.end, done.decided[-1:])
            done = await self._compute(session, piece, None)
            await self._answer(session, piece, done)

    async def _send(self, session: Session, message: Message) -> None:
        """To the client. One that does not read for as long as a session may be idle loses it."""
        try:
            await session.client.send(message, self._limits.idle_seconds)
        except TimeoutError as error:
            reason = f"nothing read for {self._limits.idle_seconds:g} s"
            raise WireError(ErrorCode.TIMED_OUT, reason) from error


async def _unless_ended(session: Session, work: Coroutine[Any, Any, None]) -> None:
    """``work``, broken off by what ends the session. Raises that, or what ``work`` raises."""
    working, ended = asyncio.create_task(work), asyncio.create_task(session.inbox.failure())
    try:
        await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ended.result()
        working.result()
    finally:
        working.cancel()
        ended.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)


def _piece(step: Step) -> Piece:
    return Piece(step.position, step.tokens, step.masked, step.decide)


def _error(session: bytes, error: WireError) -> Error:
    return Error(session=session, code=error.code, detail=error.detail[:512])


def _short(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
