"""A chain over the network, as its client sees it (protocols/hop.md)."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from spheroid_node.run import VOCABULARY, RunSpec
from spheroid_node.serving.chain import ChainLost, Sweep
from spheroid_node.serving.ports import Connection, Dial
from spheroid_node.serving.routes import Route
from spheroid_node.serving.steps import Piece, positions_per_step, split
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Close, Error, Message, Open, Opened, Result, Step, Via, Write
from spheroid_node.wire.tensors import Vector, unpack_tensor

T = TypeVar("T")

HOP_SECONDS = 15.0
"""How long a hop may take to be dialled and to open a session."""
SILENCE_SECONDS = 60.0
"""How long a chain may take to decide a byte before it counts as lost."""


@dataclass(frozen=True)
class Generation:
    """What the text depends on besides versions and prompt, and whether results carry logits."""

    seed: int = 0
    temperature: float = 0.0
    logits: bool = False


class HopFailed(Exception):
    """A hop could not be made part of a chain."""

    def __init__(self, block: int, error: BaseException) -> None:
        super().__init__(f"block {block}: {error or type(error).__name__}")
        self.block = block
        self.code = error.code if isinstance(error, WireError) else None


@dataclass
class _Step:
    """A piece whose result is awaited."""

    piece: Piece
    answer: asyncio.Future[Result]

    def fail(self, lost: ChainLost) -> None:
        if not self.answer.done():
            self.answer.set_exception(lost)


@dataclass
class _Writing:
    """A text that block 0 writes: what has been decided comes bit by bit."""

    position: int
    """Index of the next byte to be decided."""
    left: int
    decided: asyncio.Queue[Result | ChainLost]

    def fail(self, lost: ChainLost) -> None:
        self.decided.put_nowait(lost)


class RemoteChain:
    """An open session at a hop for every block. See :class:`spheroid_node.serving.chain.Chain`."""

    def __init__(
        self,
        run: RunSpec,
        route: Route,
        links: list[Connection],
        session: bytes,
        logits: bool,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self.route = route
        self.ways: tuple[Via, ...] = ()
        """How it travels from the client to block 0, between hops, and from the last to the client."""
        self._run, self._links, self._session, self._logits = run, links, session, logits
        self._silence = silence
        self._waiting: deque[_Step | _Writing] = deque()
        self._lost: ChainLost | None = None
        self._sending = asyncio.Lock()
        self._readers = [
            asyncio.create_task(self._read(block, link), name=f"chain-{block}")
            for block, link in enumerate(links)
        ]

    @classmethod
    async def open(
        cls,
        run: RunSpec,
        route: Route,
        dial: Dial,
        generation: Generation,
        *,
        silence: float = SILENCE_SECONDS,
    ) -> RemoteChain:
        """Dial all hops, then open last to first, since a hop attaches to later ones. Raises HopFailed.

        ``silence``: seconds in which the chain must decide a byte, or counts as lost.
        """
        session = secrets.token_bytes(16)
        blocks = range(len(route.hops))
        links: dict[int, Connection] = {}
        ways: list[Via] = []

        async def reach(block: int) -> None:
            links[block] = await _timed(block, dial(route.hops[block].address))

        try:
            for outcome in await asyncio.gather(*map(reach, blocks), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            for block in reversed(blocks):
                message = _opening(route, block, session, generation)
                opened = await _timed(block, _open_session(links[block], message))
                if opened.via is not None:
                    ways.insert(0, opened.via)
        except BaseException:
            await asyncio.gather(*(link.close() for link in links.values()), return_exceptions=True)
            raise
        chain = cls(run, route, [links[block] for block in blocks], session, generation.logits, silence)
        chain.ways = (links[0].via, *ways, links[len(links) - 1].via)
        return chain

    async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
        pieces = [*split(Piece(position, tokens, masked, decide), positions_per_step(self._run))]
        async with self._sending:  # the pieces of a sweep stay together
            answers = [await self._step(piece) for piece in pieces]
        try:
            async with asyncio.timeout(self._silence):
                results = [await answer for answer in answers if answer is not None]
        except TimeoutError as error:
            raise self._lose(None, ErrorCode.TIMED_OUT) from error
        sweeps = [self._sweep_of(result) for result in results]
        logits = [sweep.logits for sweep in sweeps if sweep.logits is not None]
        return Sweep(
            position=sweeps[0].position,
            tokens=b"".join(sweep.tokens for sweep in sweeps),
            logits=np.concatenate(logits) if logits else None,
            seconds=tuple(sum(hop) for hop in zip(*(sweep.seconds for sweep in sweeps), strict=True)),
        )

    async def write(
        self, position: int, tokens: bytes, count: int, drafts: int = 0, branches: int | None = None
    ) -> AsyncIterator[Sweep]:
        """``branches``: of a line of drafts; None leaves it to block 0, which knows its links."""
        writing = _Writing(position + len(tokens), count, asyncio.Queue())
        async with self._sending:
            self._expect(writing)
            await self._send(
                Write(
                    session=self._session,
                    position=position,
                    tokens=tokens,
                    count=count,
                    drafts=drafts,
                    branches=branches,
                )
            )
        while count:
            try:
                async with asyncio.timeout(self._silence):
                    result = await writing.decided.get()
            except TimeoutError as error:
                raise self._lose(None, ErrorCode.TIMED_OUT) from error
            if isinstance(result, ChainLost):
                raise result
            count -= len(result.tokens)
            # The known bytes and the first line of drafts travel together.
            yield self._sweep_of(result.model_copy(update={"line": max(result.line, 0)}))

    async def close(self) -> None:
        self._lose(None, ErrorCode.LEAVING)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*(self._part(link) for link in self._links), return_exceptions=True)

    async def _part(self, link: Connection) -> None:
        with suppress(OSError, WireError):
            async with asyncio.timeout(1):
                await link.send(Close(session=self._session))
        await link.close()

    # --- asking -------------------------------------------------------------------------------------

    async def _step(self, piece: Piece) -> asyncio.Future[Result] | None:
        """Send a step to block 0; the future is its result, if it has one. Raises :class:`ChainLost`."""
        answer: asyncio.Future[Result] | None = None
        if piece.decide:
            answer = asyncio.get_running_loop().create_future()
            # Nobody may be left to wait for it when the chain is lost between two pieces.
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._expect(_Step(piece, answer))
        step = Step(
            session=self._session,
            position=piece.position,
            tokens=piece.tokens,
            masked=piece.masked,
            decide=piece.decide,
        )
        await self._send(step)
        return answer

    def _expect(self, waiting: _Step | _Writing) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiting.append(waiting)

    async def _send(self, message: Message) -> None:
        try:
            await self._links[0].send(message)
        except (OSError, WireError) as error:
            raise self._lose(0, ErrorCode.NEXT_HOP_LOST, str(error)) from error

    # --- answers ------------------------------------------------------------------------------------

    async def _read(self, block: int, link: Connection) -> None:
        """Take what a hop sends: results from the last one, and the end of the session from any."""
        try:
            while True:
                self._take(block, await link.receive())
        except WireError as error:
            self._lose(block, error.code, error.detail)
        except OSError as error:
            self._lose(block, ErrorCode.NEXT_HOP_LOST, str(error))

    def _take(self, block: int, message: Message) -> None:
        """Raises :class:`WireError` for anything but the next result or an error."""
        last = len(self._links) - 1
        if isinstance(message, Error):
            lost = {ErrorCode.NEXT_HOP_LOST: block + 1, ErrorCode.LAST_HOP_LOST: last}
            self._lose(min(lost.get(message.code, block), last), message.code, message.detail)
            return
        if not isinstance(message, Result) or block != last or not self._waiting:
            raise WireError(ErrorCode.UNEXPECTED, "not a result that was asked for")
        if message.session != self._session or len(message.seconds) != len(self._links):
            raise WireError(ErrorCode.MALFORMED, "a result of another chain")
        waiting = self._waiting[0]
        if isinstance(waiting, _Step):
            self._take_step(waiting, message)
        else:
            self._take_written(waiting, message)

    def _take_step(self, waiting: _Step, result: Result) -> None:
        piece = waiting.piece
        if (result.position, len(result.tokens)) != (piece.first_decided, piece.decide):
            raise WireError(ErrorCode.MALFORMED, "a result of another step")
        self._waiting.popleft()
        if not waiting.answer.done():
            waiting.answer.set_result(result)

    def _take_written(self, waiting: _Writing, result: Result) -> None:
        if result.position != waiting.position or len(result.tokens) > waiting.left:
            raise WireError(ErrorCode.MALFORMED, "a result for another place")
        waiting.position += len(result.tokens)
        waiting.left -= len(result.tokens)
        waiting.decided.put_nowait(result)
        if not waiting.left:
            self._waiting.popleft()

    def _sweep_of(self, result: Result) -> Sweep:
        logits = self._logits_of(result) if self._logits else None
        return Sweep(result.position, result.tokens, logits, tuple(result.seconds), result.line)

    def _logits_of(self, result: Result) -> Vector:
        try:
            return unpack_tensor(result.logits, (len(result.tokens), VOCABULARY))
        except WireError as error:
            raise self._lose(len(self._links) - 1, error.code, error.detail) from error

    def _lose(self, block: int | None, code: ErrorCode, detail: str = "") -> ChainLost:
        """From now on everything fails, with the first reason there was."""
        if self._lost is None:
            self._lost = ChainLost(block, code, detail)
        while self._waiting:
            self._waiting.popleft().fail(self._lost)
        return self._lost


async def _timed(block: int, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(HOP_SECONDS):
            return await work
    except (OSError, WireError) as error:
        raise HopFailed(block, error) from error


def _opening(route: Route, block: int, session: bytes, generation: Generation) -> Open:
    last = block == len(route.hops) - 1
    return Open(
        session=session,
        block=block,
        block_version=route.hops[block].version,
        interface_version=route.interface,
        next=None if last else route.hops[block + 1].address,
        last=route.hops[-1].address if block == 0 and not last else None,
        seed=generation.seed,
        temperature=generation.temperature,
        logits=generation.logits,
    )


async def _open_session(link: Connection, message: Open) -> Opened:
    await link.send(message)
    answer = await link.receive()
    if isinstance(answer, Error):
        raise WireError(answer.code, answer.detail)
    if not isinstance(answer, Opened) or answer.session != message.session:
        raise WireError(ErrorCode.UNEXPECTED, "not the answer to an opening")
    return answer
