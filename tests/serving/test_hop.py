"""What ends a session at a hop, and that it ends alone."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np
import pytest

from spheroid_node.serving.chain import ChainLost
from spheroid_node.serving.sessions import Limits
from spheroid_node.wire.codes import ErrorCode
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
    Want,
)
from spheroid_node.wire.tensors import pack_tensor
from tests.serving.memory import DEADLINE, MakeSwarm, MemoryLink, Swarm, opening, small_model, until

LAST = 2


def step(session: bytes, **changes: Any) -> Step:
    fields: dict[str, Any] = {"session": session, "position": 0, "tokens": b"abc"}
    return Step(**fields | changes)


def state(session: bytes, count: int = 3, **changes: Any) -> State:
    zeros = pack_tensor(np.zeros((count, 16), np.float32))
    fields: dict[str, Any] = {
        "session": session, "position": 0, "tokens": b"a" * count, "masked": 0, "decide": 1, "hidden": zeros,
        "noisy": zeros, "log_probs": None, "seconds": [0.0, 0.0],
    }  # fmt: skip
    return State(**fields | changes)


async def dial(swarm: Swarm, peer: str) -> MemoryLink:
    return await swarm.network.dial(HopAddress(peer=peer, host="memory", port=1))


async def attached(swarm: Swarm) -> tuple[MemoryLink, MemoryLink, bytes]:
    """A session at the last hop: the client's connection, the connection of a hop before, its name."""
    client, name = await swarm.session(f"hop-{LAST}", block=LAST)
    upstream = await dial(swarm, f"hop-{LAST}")
    await upstream.send(Attach(session=name))
    assert await upstream.receive(DEADLINE) == Attached(session=name)
    return client, upstream, name


async def answer(link: MemoryLink) -> Message:
    return await link.receive(DEADLINE)


async def expect_error(link: MemoryLink, code: ErrorCode, session: bytes | None) -> None:
    message = await answer(link)
    assert isinstance(message, Error), message
    assert (message.code, message.session) == (code, session), message


@pytest.fixture
def single(make_swarm: MakeSwarm) -> Swarm:
    """A run of one block: one hop that is the first and the last."""
    return make_swarm(small_model(blocks=1))


BAD_STEPS = {
    "gap": (ErrorCode.UNEXPECTED, {"position": 1}),
    "decides too much": (ErrorCode.MALFORMED, {"decide": 4}),
    "too many positions": (ErrorCode.TOO_LARGE, {"masked": 65_536}),
    "longer than a window": (ErrorCode.TOO_LARGE, {"tokens": b"a" * 25}),
}


@pytest.mark.parametrize("name", BAD_STEPS)
async def test_a_bad_step_ends_its_session_alone(single: Swarm, name: str) -> None:
    code, changes = BAD_STEPS[name]
    link, session = await single.session("hop-0")
    await link.send(opening(other := secrets.token_bytes(16)))
    assert await answer(link) == Opened(session=other)
    await link.send(step(session, **changes))
    await expect_error(link, code, session)
    await link.send(step(session))
    await expect_error(link, ErrorCode.NOT_FOUND, session)
    await link.send(step(other))
    assert isinstance(await answer(link), Result)
    assert single.node("hop-0").service.sessions == 1


BAD_STATES = {
    "of another width": (ErrorCode.MALFORMED, {"hidden": pack_tensor(np.zeros((3, 17), np.float32))}),
    "of another count": (ErrorCode.MALFORMED, {"noisy": pack_tensor(np.zeros((2, 16), np.float32))}),
    "not a tensor": (ErrorCode.MALFORMED, {"noisy": {"dtype": "object"}}),
    "not finite": (ErrorCode.MALFORMED, {"hidden": pack_tensor(np.full((3, 16), np.nan, np.float32))}),
    "of another block": (ErrorCode.MALFORMED, {"seconds": [0.0]}),
    "with log-probabilities": (
        ErrorCode.MALFORMED,
        {"log_probs": pack_tensor(np.zeros((3, 256), np.float32))},
    ),
    "after a gap": (ErrorCode.UNEXPECTED, {"position": 7}),
}


@pytest.mark.parametrize("name", BAD_STATES)
async def test_a_bad_state_ends_its_session_alone(make_swarm: MakeSwarm, name: str) -> None:
    code, changes = BAD_STATES[name]
    swarm = make_swarm()
    client, upstream, session = await attached(swarm)
    other_client, other_upstream, other = await attached(swarm)
    await upstream.send(state(session, **changes))
    await expect_error(client, code, session)
    with pytest.raises(ConnectionError):
        await answer(upstream)
    await other_upstream.send(state(other))
    assert isinstance(await answer(other_client), Result)


async def test_garbage_ends_its_connection_alone(single: Swarm) -> None:
    good, session = await single.session("hop-0")
    for body in (b"\xc1", b"\x80", Want(group="block-0", version=0).pack()):
        bad, _ = await single.session("hop-0")
        bad.send_body(body)
        message = await answer(bad)
        assert isinstance(message, Error) and message.session is None
        with pytest.raises(ConnectionError):
            await answer(bad)
    await good.send(step(session))
    assert isinstance(await answer(good), Result)
    await until(lambda: single.node("hop-0").service.sessions == 1)


async def test_a_step_from_someone_else_changes_nothing(single: Swarm) -> None:
    owner, session = await single.session("hop-0")
    thief = await dial(single, "hop-0")
    for message in (step(session), state(session, seconds=[]), Close(session=session)):
        await thief.send(message)
        await expect_error(thief, ErrorCode.NOT_FOUND, session)
    await owner.send(step(session))
    assert isinstance(await answer(owner), Result)


async def test_messages_out_of_place(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    link, session = await swarm.session(f"hop-{LAST}", block=LAST)
    await link.send(step(session))  # only block 0 takes steps
    await expect_error(link, ErrorCode.UNEXPECTED, session)
    client, upstream, session = await attached(swarm)
    await upstream.send(step(session))
    await expect_error(client, ErrorCode.UNEXPECTED, session)
    stranger = await dial(swarm, f"hop-{LAST}")
    await stranger.send(Attach(session=bytes(16)))
    await expect_error(stranger, ErrorCode.NOT_FOUND, bytes(16))


async def test_a_new_hop_before_takes_over_from_a_lost_one(make_swarm: MakeSwarm) -> None:
    """The caches survive, so that only the lost hop has to be replayed."""
    swarm = make_swarm()
    client, upstream, session = await attached(swarm)
    await upstream.send(state(session))
    first = await answer(client)
    await upstream.close()
    replacement = await dial(swarm, f"hop-{LAST}")
    await replacement.send(Attach(session=session))
    assert await answer(replacement) == Attached(session=session)
    await replacement.send(state(session, count=1, position=3))
    second = await answer(client)
    assert isinstance(first, Result) and isinstance(second, Result)
    assert (first.position, second.position) == (3, 4)


BAD_OPENINGS = {
    "another block": (ErrorCode.NOT_FOUND, {"block": 1}),
    "a version that is gone": (ErrorCode.VERSION_GONE, {"block_version": 2}),
    "an interface that is gone": (ErrorCode.VERSION_GONE, {"interface_version": 8}),
    "a hop after the last": (ErrorCode.MALFORMED, {"next": HopAddress(peer="p", host="h", port=1)}),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
async def test_refused_openings(single: Swarm, name: str) -> None:
    code, changes = BAD_OPENINGS[name]
    link = await dial(single, "hop-0")
    await link.send(opening(session := bytes(16), **changes))
    await expect_error(link, code, session)
    await link.send(opening(session))  # the connection is as good as before
    assert await answer(link) == Opened(session=session)
    await link.send(opening(session))
    await expect_error(link, ErrorCode.UNEXPECTED, session)


async def test_session_limit(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(sessions=2))
    links = [await swarm.session("hop-0") for _ in range(2)]
    link = await dial(swarm, "hop-0")
    await link.send(opening(session := bytes(16)))
    await expect_error(link, ErrorCode.BUSY, session)
    await links[0][0].send(Close(session=links[0][1]))
    await until(lambda: swarm.node("hop-0").service.sessions == 1)
    await link.send(opening(session))
    assert await answer(link) == Opened(session=session)


async def test_a_client_that_sends_ahead_is_read_no_faster_than_is_computed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(waiting=2))
    link, session = await swarm.session("hop-0")
    assert link.other is not None
    unread = []
    for position in range(40):
        await link.send(step(session, position=position, tokens=b"a"))
    for position in range(40):
        message = await answer(link)
        assert isinstance(message, Result) and message.position == position + 1
        unread.append(link.other.inbox.qsize())
    assert unread[0] >= 30  # and not all of them taken in and waiting at the hop


async def test_text_limit(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(positions=5))
    link, session = await swarm.session("hop-0")
    await link.send(step(session, tokens=b"abcde"))
    assert isinstance(await answer(link), Result)
    await link.send(step(session, position=5, tokens=b"f"))
    await expect_error(link, ErrorCode.TOO_LARGE, session)


async def test_idle_session_is_ended(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(idle_seconds=0.05))
    link, session = await swarm.session("hop-0")
    await expect_error(link, ErrorCode.TIMED_OUT, session)
    assert swarm.node("hop-0").service.sessions == 0


async def test_a_connection_that_asks_for_nothing_is_ended(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1), Limits(idle_seconds=0.05))
    link = await dial(swarm, "hop-0")
    with pytest.raises(ConnectionError):
        await answer(link)


async def test_a_client_that_vanishes_frees_the_session_everywhere(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    services = [swarm.node(f"hop-{block}").service for block in range(3)]
    sweep = asyncio.create_task(chain.sweep(0, b"The castle"))
    clients = swarm.network.dialled[:3]
    await asyncio.sleep(0)
    for link in clients:
        await link.close()
    await until(lambda: not any(service.sessions for service in services))
    with pytest.raises(ChainLost):
        await sweep
    await chain.close()
    again = await swarm.chain()
    assert (await again.sweep(0, b"The castle")).tokens
    await again.close()


async def test_next_hop_that_cannot_be_reached(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    link = await dial(swarm, "hop-0")
    await link.send(opening(session := bytes(16), next=HopAddress(peer="nobody", host="h", port=1)))
    await expect_error(link, ErrorCode.NEXT_HOP_LOST, session)
    assert swarm.node("hop-0").service.sessions == 0
    # A next hop that is there but knows nothing of the session is no better.
    await link.send(opening(session, next=HopAddress(peer="hop-1", host="h", port=1)))
    await expect_error(link, ErrorCode.NEXT_HOP_LOST, session)


async def test_next_hop_that_dies(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    _, session = await swarm.session(f"hop-{LAST}", block=LAST)
    link = await dial(swarm, "hop-1")
    following = HopAddress(peer=f"hop-{LAST}", host="memory", port=1)
    await link.send(opening(session, block=1, next=following))
    assert await answer(link) == Opened(session=session, via="tcp")
    await swarm.node(f"hop-{LAST}").vanish()
    await expect_error(link, ErrorCode.NEXT_HOP_LOST, session)
    assert swarm.node("hop-1").service.sessions == 0


async def test_stopping_tells_every_client(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(small_model(blocks=1))
    link, session = await swarm.session("hop-0")
    await swarm.node("hop-0").service.stop()
    await expect_error(link, ErrorCode.LEAVING, session)
    await link.send(Open(**opening(bytes(16)).fields()))
    await expect_error(link, ErrorCode.LEAVING, bytes(16))


async def test_hop_seconds_are_those_of_single_positions(single: Swarm) -> None:
    service = single.node("hop-0").service
    link, session = await single.session("hop-0")
    await link.send(step(session))
    await answer(link)
    assert service.hop_seconds == 0
    await link.send(step(session, position=3, tokens=b"d"))
    await answer(link)
    assert service.hop_seconds > 0


async def test_a_failing_model_ends_the_session_alone(single: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    link, session = await single.session("hop-0")
    with monkeypatch.context() as patch:
        patch.setattr("spheroid_node.serving.engine.advance", lambda *_: 1 / 0)
        await link.send(step(session))
        await expect_error(link, ErrorCode.INTERNAL, session)
    await link.send(opening(session))
    assert await answer(link) == Opened(session=session)
    await link.send(step(session))
    assert isinstance(await answer(link), Result)
