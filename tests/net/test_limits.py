"""What one peer may ask of a node: it waits, and others do not."""

from __future__ import annotations

import asyncio

import pytest

from spheroid_node.net import limits, links
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.limits import Allowance, Allowances, Rates
from spheroid_node.net.link import Link, LinkClosed
from spheroid_node.net.links import LinkFailed, _origin
from spheroid_node.wire.codes import ErrorCode
from spheroid_node.wire.messages import Chunk, Read, Want
from spheroid_node.wire.tensors import CHUNK_BYTES

WANT = Want(group="block-0", version=3)


class Time:
    now = 5.0

    def __call__(self) -> float:
        return self.now


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


async def give(link: Link) -> None:
    """A chunk for every message."""
    while True:
        await link.receive()
        await link.send(Chunk(index=0, data=bytes(CHUNK_BYTES)))


def test_what_is_used_is_forgotten_at_the_rate() -> None:
    clock = Time()
    used = Allowance(Rates(10, 2.0, 1000, 100.0), clock)
    used.use(10, 1000)
    assert used.owed() == 0
    used.use(1, 0)
    assert used.owed() == 0.5
    used.use(0, 200)
    assert used.owed() == 2.0
    clock.now += 1.5
    assert used.owed() == 0.5
    clock.now += 100
    assert used.owed() == 0 and used.is_unused


def test_a_new_connection_does_not_renew_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_KEPT", 3)
    clock = Time()
    peers = Allowances(Rates(10, 2.0, 1000, 100.0), clock)
    peers.of("greedy").use(50, 0)
    for name in "abcdef":
        peers.of(name)
    assert len(peers._of) <= 4, "those who owe nothing are forgotten"
    assert peers.of("greedy").owed() == 20.0


def test_a_joiner_takes_all_that_a_node_holds_without_waiting() -> None:
    """And does so again in the next round."""
    clock, held = Time(), 10**10
    used = Allowance(Rates.for_versions(held, 600.0), clock)
    for _ in range(3):
        for _ in range(held // CHUNK_BYTES):
            used.use(1, 100)
            used.use(0, CHUNK_BYTES)
        used.use(100, 0)
        assert used.owed() == 0
        clock.now += 600.0


@pytest.mark.parametrize("rates", [Rates(5, 20.0, 1e9, 1e9), Rates(1e9, 1e9, 5e6, 20e6)])
async def test_who_asks_for_more_is_answered_more_slowly(net, alice, bob, rates: Rates) -> None:
    address = await net.serve(alice, give, rates=rates)
    loop = asyncio.get_running_loop()
    began = loop.time()
    links = [await net.dial(address, bob) for _ in range(2)]
    for link in links:  # both count for the same peer
        for _ in range(8):
            await link.send(Read(group="block-0", version=1, index=0))
    for link in links:
        for _ in range(8):
            await link.expect(Chunk, 30)
    assert loop.time() - began >= 0.4, "eleven more than five, at twenty a second"
    began = loop.time()
    other = await net.dial(address, alice)
    await other.send(WANT)
    await other.expect(Chunk, 10)
    assert loop.time() - began < 0.4, "nobody else waits"


async def test_hops_are_not_metered(net, alice, bob) -> None:
    address = await net.serve(alice, echo, rates=Rates(1, 0.001, 1, 0.001))
    link = await net.dial(address, bob, "hop")
    for _ in range(20):
        await link.send(WANT)
        assert await link.receive(10) == WANT


async def test_a_receive_that_times_out_while_its_peer_has_to_wait_loses_nothing(net, alice, bob) -> None:
    heard: list[object] = []

    async def impatient(link: Link) -> None:
        while True:
            try:
                heard.append(await link.receive(timeout=0.05))
            except TimeoutError:
                heard.append(None)

    address = await net.serve(alice, impatient, rates=Rates(1, 5.0, 1e9, 1e9))
    link = await net.dial(address, bob)
    for index in range(3):
        await link.send(Read(group="block-0", version=1, index=index))
    async with asyncio.timeout(10):
        while sum(message is not None for message in heard) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [message.index for message in heard if isinstance(message, Read)] == [0, 1, 2]
    assert None in heard


async def test_strangers_of_one_address_cannot_take_all_links(net, alice, bob) -> None:
    """Connections that say nothing: of those who are proven there may be more."""
    address = await net.serve(alice, echo, max_strangers=3, handshake_timeout=0.5, max_connections=50)
    proven = [await net.dial(address, bob) for _ in range(5)]
    silent = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
    with pytest.raises((LinkFailed, LinkClosed)):
        await net.dial(address, bob)
    await proven[0].send(WANT)
    assert await proven[0].receive(10) == WANT
    await net.dial_when_free(address, bob)  # the silent ones are dropped in time
    for _, writer in silent:
        writer.close()


async def test_made_up_identities_of_one_address_leave_half_to_others(net, alice, bob, monkeypatch) -> None:
    """Keys are free, so a peer's own limit stops nobody who makes another."""
    place = ["192.0.2.7"]
    monkeypatch.setattr(links, "_origin", lambda address: place[0])
    address = await net.serve(alice, echo, max_connections=8, max_per_peer=2)
    held = [await net.dial(address, ephemeral_identity()) for _ in range(4)]
    with pytest.raises(LinkFailed, match="one address") as failed:
        await net.dial(address, ephemeral_identity())
    assert failed.value.code is ErrorCode.BUSY
    place[0] = "192.0.2.8"
    others = [await net.dial(address, ephemeral_identity()) for _ in range(4)]
    await others[-1].send(WANT)
    assert await others[-1].receive(10) == WANT
    place[0] = "192.0.2.7"
    await held[0].close()
    await net.dial_when_free(address, bob)


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_what_counts_as_one_address(address: str, origin: str) -> None:
    assert _origin(address) == origin
