"""Finding a chain, and another one when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from spheroid_node.errors import BlockWithoutReplica, ChainFailed
from spheroid_node.run import RunSpec
from spheroid_node.serving.chain import Chain, ChainLost
from spheroid_node.serving.decoders import DecoderName, decode
from spheroid_node.serving.ports import Dial, Measure, NodeDirectory
from spheroid_node.serving.remote import Generation, HopFailed, RemoteChain
from spheroid_node.serving.routes import Avoid, Route, Versions, choose_route, delays_between
from spheroid_node.wire.codes import ErrorCode
from spheroid_node.wire.messages import HopAddress
from spheroid_node.wire.records import NodeRecord

log = structlog.get_logger()

FIRST_SECONDS = 5.0
"""How long the first chain may take to be found."""
PATIENCE = 60.0
"""How long a text waits for another chain, by default."""
RETRY_SECONDS = 0.25
LONGEST_RETRY = 2.0


class ChainFinder:
    """Opens chains of the quickest live replicas for one text.

    A replica that fails is left alone for a while. All chains of a text serve the versions that its first one
    served, as long as a replica of each block holds them.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        run: RunSpec,
        dial: Dial,
        generation: Generation,
        *,
        measure: Measure | None = None,
        patience: float = PATIENCE,
        waiting: Callable[[str], None] = lambda reason: None,
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._run, self._dial, self._generation = directory, run, dial, generation
        self._measure, self._distances = measure, dict[str, float]()
        self._patience, self._waiting = patience, waiting
        self._retry_seconds, self._clock = retry_seconds, clock
        self._avoid = Avoid()
        self._failure = ""
        self.versions: Versions | None = None
        """What the text was begun with; None before the first chain."""
        self.chain: RemoteChain | None = None
        """The newest."""
        self.found = 0
        """Chains opened so far."""

    async def open(self) -> RemoteChain:
        """Try, with pauses that grow, until there is a chain or patience ends.

        The first chain must be there within :data:`FIRST_SECONDS`, and a block that nobody owns is told at
        once. Raises :class:`BlockWithoutReplica`, :class:`ChainFailed`.
        """
        first, began, pause = self.versions is None, self._clock(), self._retry_seconds
        while True:
            try:
                return await self._attempt()
            except BlockWithoutReplica as error:
                if first and not self._avoid.peers:  # else they are there, but have all failed
                    raise
                failure = self._failure or error.problem
            except ChainFailed as error:
                failure = self._failure = error.problem.removeprefix("The chain of blocks failed: ")
            except HopFailed as error:
                failure = self._failure = str(error)
            left = began + (FIRST_SECONDS if first else self._patience) - self._clock()
            if left <= 0:
                raise ChainFailed(failure)
            if not first:
                self._waiting(failure)
            log.info("chain.retried", cause=failure)
            await asyncio.sleep(min(pause, max(left, 0.01)))
            pause = min(2 * pause, LONGEST_RETRY)

    async def _attempt(self) -> RemoteChain:
        run, blocks = self._run, range(self._run.model.blocks)
        records = await asyncio.gather(*(self._directory.nodes(block) for block in blocks))
        self._avoid.now = self._clock()
        await self._look_around(records)
        delay = delays_between(records, self._distances)
        route = choose_route(run, records, self._avoid, pinned=self.versions, delay=delay)
        try:
            chain = await RemoteChain.open(run, route, self._dial, self._generation)
        except HopFailed as error:
            self._blame(route, error.block, error.code)
            raise
        if self.versions is not None and self.versions != route.versions:
            log.warning("chain.versions_changed", was=str(self.versions), now=str(route.versions))
        self.versions, self._failure = route.versions, ""
        self.found += 1
        self.chain = chain
        return chain

    async def _look_around(self, records: Sequence[Mapping[str, NodeRecord]]) -> None:
        """Measure the ends that a way may begin or finish with, where there is a choice."""
        choices = [nodes for nodes in (records[0], records[-1]) if len(nodes) > 1]
        new = {
            peer: HopAddress(peer=peer, host=record.host, port=record.port)
            for nodes in choices
            for peer, record in nodes.items()
            if peer not in self._distances
        }
        if self._measure is not None and new:
            self._distances |= await self._measure(new.values())

    def lost(self, chain: RemoteChain, error: ChainLost) -> None:
        """``chain`` was lost: leave the hop alone that failed it."""
        if error.block is not None:
            self._blame(chain.route, error.block, error.code, named=True)

    def _blame(self, route: Route, block: int, code: ErrorCode | None, named: bool = False) -> None:
        """Leave out what failed: the versions, the hop that another cannot reach, or the hop itself."""
        last = len(route.hops) - 1
        if not named and code is ErrorCode.NEXT_HOP_LOST:
            block += 1
        elif not named and code is ErrorCode.LAST_HOP_LOST:
            block = last
        hop = route.hops[min(block, last)]
        if code is ErrorCode.VERSION_GONE:
            self._avoid.versions.add((hop.address.peer, hop.version, route.interface))
        else:
            self._avoid.blame(hop.address.peer)


C = TypeVar("C", bound=Chain)


class ChainSource(Protocol[C]):
    """Where a text's chains come from."""

    async def open(self) -> C: ...

    def lost(self, chain: C, error: ChainLost) -> None: ...


class WithFirst(Generic[C]):
    """``source``, whose first chain is open already."""

    def __init__(self, source: ChainSource[C], first: C) -> None:
        self._source, self._first = source, [first]

    async def open(self) -> C:
        return self._first.pop() if self._first else await self._source.open()

    def lost(self, chain: C, error: ChainLost) -> None:
        self._source.lost(chain, error)


async def write_on(
    source: ChainSource[C],
    decoder: DecoderName,
    run: RunSpec,
    prompt: bytes,
    count: int,
    wrapped: Callable[[C], Chain] = lambda chain: chain,
) -> AsyncIterator[bytes]:
    """``count`` bytes after ``prompt``, as they are decided, over as many chains as it takes.

    When a chain is lost, the next one gets all that was decided as known bytes and goes on; the text does not
    show it. ``wrapped`` puts something around a chain, a measurement say. Raises what ``source.open`` raises;
    what was yielded before stays valid.
    """
    text, closing = prompt, set[asyncio.Task[None]]()
    try:
        while count:
            chain = await source.open()
            try:
                async for decided in decode(decoder, run, wrapped(chain), text, count):
                    text, count = text + decided, count - len(decided)
                    yield decided
            except ChainLost as error:
                log.info("chain.lost", cause=str(error))
                source.lost(chain, error)
            finally:
                # Its dead connections must not hold up the next chain.
                closing.add(asyncio.create_task(chain.close()))
    finally:
        await asyncio.gather(*closing, return_exceptions=True)
