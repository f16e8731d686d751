"""Who gets the room of a hop, and that no text's precision depends on its company."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, cast

import pytest
import torch

from spheroid_node.model.cache import BlockCache
from spheroid_node.model.randomness import decide
from spheroid_node.serving.engine import for_serving
from spheroid_node.serving.ports import Connection
from spheroid_node.serving.sessions import Inbox, Limits, Session, SessionTable
from spheroid_node.serving.steps import Part, Piece, advance
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.messages import Error, HopAddress, Opened, Result, Step
from tests.serving.memory import DEADLINE, MakeSwarm, MemoryLink, link_pair, opening, small_model


def session(client: str, cached: int = 0) -> Session:
    link, _ = link_pair(server=client)
    made = Session(opening(secrets.token_bytes(16)), cast(Connection, link), Inbox(4))
    cache = BlockCache(1, 8)
    if cached:
        cache.layers[0].append(torch.zeros(1, cached, 1, dtype=torch.float64))
    made.cache = cache
    return made


# --- room -------------------------------------------------------------------------------------------


def test_a_full_hop_takes_from_the_client_that_has_most() -> None:
    table = SessionTable(Limits(sessions=4))
    greedy = [session("greedy") for _ in range(3)]
    for one in (*greedy, session("modest")):
        assert table.add(one) is None
    assert table.add(session("new")) is greedy[2]
    assert table.add(session("other")) is greedy[1]
    with pytest.raises(WireError, match="busy"):
        table.add(session("greedy"))
    assert len(table) == 4


def test_between_equals_the_first_stay() -> None:
    table = SessionTable(Limits(sessions=2))
    table.add(session("a"))
    table.add(session("b"))
    with pytest.raises(WireError, match="busy"):
        table.add(session("c"))


def test_caches_that_outgrow_the_limit_cost_the_greediest_its_newest() -> None:
    table = SessionTable(Limits(cache_bytes=2000))
    first, second, other = session("greedy", 64), session("greedy", 64), session("modest", 64)
    for one in (first, second):
        table.add(one)
    assert table.over_limit() is None
    table.add(other)
    assert sum(one.cache.bytes for one in (first, second)) <= 2000  # type: ignore[union-attr]
    big = session("greedy", 64)
    table._sessions[big.id] = big
    assert table.over_limit() is big
    table.remove(big)
    assert table.over_limit() is None


async def dial(swarm: Any, peer: str, client: str) -> MemoryLink:
    link = await swarm.network.dial(HopAddress(peer=peer, host="memory", port=1))
    link.other.peer = client
    return cast(MemoryLink, link)


async def test_a_client_with_little_gets_a_place_at_a_full_hop(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(sessions=3))
    greedy, modest = await dial(swarm, "hop-0", "greedy"), await dial(swarm, "hop-0", "modest")
    names = [secrets.token_bytes(16) for _ in range(3)]
    for name in names:
        await greedy.send(opening(name))
        assert await greedy.receive(DEADLINE) == Opened(session=name)
    await modest.send(opening(other := secrets.token_bytes(16)))
    assert await modest.receive(DEADLINE) == Opened(session=other)
    ended = await greedy.receive(DEADLINE)
    assert isinstance(ended, Error) and (ended.code, ended.session) == (ErrorCode.BUSY, names[2])
    await greedy.send(Step(session=names[0], position=0, tokens=b"abc"))
    assert isinstance(await greedy.receive(DEADLINE), Result)


async def test_memory_stays_within_the_limit_and_the_rest_goes_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(cache_bytes=100_000))
    service = swarm.node("hop-0").service
    link = await dial(swarm, "hop-0", "greedy")
    ended = 0
    for _ in range(20):
        await link.send(opening(name := secrets.token_bytes(16)))
        await link.send(Step(session=name, position=0, tokens=b"a" * 20))
        message = await link.receive(DEADLINE)
        while not isinstance(message, Result):
            ended += isinstance(message, Error)
            if isinstance(message, Error) and message.session == name:
                break
            message = await link.receive(DEADLINE)
        held = sum(one.cache.bytes for one in service._sessions.all() if one.cache)
        assert held <= 2 * 100_000
    assert ended and 0 < service.sessions < 20


# --- company ----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_thousands_of_decisions_do_not_depend_on_how_they_are_computed() -> None:
    """One position at a time, many, and in the company of other texts: the same bytes, logits to 1e-12."""
    model = small_model(window=32)
    hop = for_serving(model.hop(0))
    generator = torch.Generator().manual_seed(0)
    texts = [bytes(torch.randint(0, 256, (700,), generator=generator).tolist()) for _ in range(4)]

    def run(cuts: list[int], together: bool) -> list[torch.Tensor]:
        caches = [hop.block.new_cache() for _ in texts]
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        start = 0
        for cut in cuts:
            parts = [
                Part(Piece(start, text[start : start + cut]), cache, None, seed)
                for seed, (text, cache) in enumerate(zip(texts, caches, strict=True))
            ]
            batches = [parts] if together else [[part] for part in parts]
            outputs = [output for batch in batches for output in advance(hop, batch)]
            for logits, (_, logits_BTV) in zip(found, outputs, strict=True):
                logits.append(logits_BTV[0])
            start += cut
        return [torch.cat(logits) for logits in found]

    single = run([1] * 700, together=False)
    mixed = run([7, 1, 32, 20, 9, 31] * 7, together=True)
    decisions = 0
    for seed, (alone, others) in enumerate(zip(single, mixed, strict=True)):
        torch.testing.assert_close(others, alone, rtol=1e-12, atol=1e-12)
        for temperature in (0.0, 1.0):
            for place, (one, other) in enumerate(zip(alone, others, strict=True)):
                assert decide(one, seed, place, temperature) == decide(other, seed, place, temperature)
                decisions += 1
    assert decisions == 5600


async def test_put_waits_for_room_and_an_end_does_not() -> None:
    inbox = Inbox(1)
    work = Step(session=bytes(16), position=0, tokens=b"a")
    await inbox.put(work)
    second = asyncio.create_task(inbox.put(work))
    await asyncio.sleep(0)
    assert not second.done()
    inbox.end(WireError(ErrorCode.LEAVING))
    assert (await inbox.failure()).code is ErrorCode.LEAVING
    assert await inbox.get() == work
    with pytest.raises(WireError, match="leaving"):
        await inbox.get()
    await second
    third = asyncio.create_task(inbox.put(work))
    await asyncio.sleep(0)
    assert not third.done()
    inbox.close()  # the session is over, and its connection must not hang
    await third
