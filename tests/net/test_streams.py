"""Links over libp2p: real daemons on loopback, peers whose TCP port nobody reaches, and strangers."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import psutil
import pytest
import pytest_asyncio

from spheroid_node.net import dialling
from spheroid_node.net.daemon_streams import DaemonStreams
from spheroid_node.net.dht import Dht
from spheroid_node.net.dialling import Dialler
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.link import CLOSE_TIMEOUT, Link, LinkClosed
from spheroid_node.net.links import LinkFailed, LinkServer, Traffic
from spheroid_node.net.streams import Stream, StreamFailed, link_name
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import HEADER
from spheroid_node.wire.messages import (
    Chunk,
    Error,
    Greeting,
    Hello,
    HopAddress,
    Message,
    Want,
    decode,
)
from spheroid_node.wire.signing import sign_bytes
from spheroid_node.wire.tensors import CHUNK_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLOSED_PORT = 1
PROMPTLY = 5.0
"""Seconds: what takes milliseconds, on a machine that does something else."""
WANT = Want(group="block-0", version=3)


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


def frame(message: Message) -> bytes:
    body = message.pack()
    return HEADER.pack(len(body)) + body


async def read_message(stream: Stream) -> Message:
    (length,) = HEADER.unpack(await stream.reader.readexactly(HEADER.size))
    return decode(await stream.reader.readexactly(length))


async def at_its_end(stream: Stream) -> bool:
    """Whether the other side closes the stream; a reset is an end too."""
    async with asyncio.timeout(PROMPTLY):
        with suppress(ConnectionError):
            return await stream.reader.read() == b""
        return True


class Swarm:
    """DHT peers that know ``first``, and servers and links of theirs; everything ends with the test."""

    def __init__(self, run: RunSpec, first: Dht, stack: AsyncExitStack) -> None:
        self.run, self.first, self.stack = run, first, stack

    async def dht(self, **options: Any) -> Dht:
        dht = await Dht.start(ephemeral_identity(), self.first.addresses, **options)
        self.stack.push_async_callback(dht.stop)
        return dht

    async def serve(
        self, dht: Dht, service: Callable[[Link], Awaitable[None]] = echo, **limits: Any
    ) -> LinkServer:
        services = {"round": service, "transfer": service, "hop": service}
        server = LinkServer(
            dht.identity, self.run, "127.0.0.1", 0, services, Traffic(), streams=dht.streams, **limits
        )
        await server.start()
        self.stack.push_async_callback(server.stop)
        return server

    def dialler(self, dht: Dht, identity: Identity | None = None, run_id: str | None = None) -> Dialler:
        return Dialler(identity or dht.identity, run_id or self.run.run_id, Traffic(), dht.streams)

    async def link(self, dht: Dht, to: Dht) -> Link:
        link = await self.dialler(dht).dial(closed(to), "transfer")
        self.stack.callback(link.abort)
        return link

    async def stranger(self, dht: Dht, to: Dht) -> Stream:
        """A stream without our protocol."""
        stream = await dht.streams.open(to.peer, link_name(self.run.run_id), 10)
        self.stack.callback(stream.writer.transport.abort)
        return stream


def closed(dht: Dht) -> HopAddress:
    """As a node with a firewall announces itself: nobody reaches its TCP port."""
    return HopAddress(peer=dht.peer, host="127.0.0.1", port=CLOSED_PORT)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def daemons() -> AsyncIterator[tuple[Dht, Dht]]:
    """Two that all tests share: daemons take their time to start."""
    async with AsyncExitStack() as stack:
        alice = await Dht.start(ephemeral_identity())
        stack.push_async_callback(alice.stop)
        bob = await Dht.start(ephemeral_identity(), alice.addresses, client_mode=True)
        stack.push_async_callback(bob.stop)
        yield alice, bob


@pytest.fixture
def alice_dht(daemons: tuple[Dht, Dht]) -> Dht:
    return daemons[0]


@pytest.fixture
def bob_dht(daemons: tuple[Dht, Dht]) -> Dht:
    """A client: it listens nowhere."""
    return daemons[1]


@pytest_asyncio.fixture(loop_scope="module")
async def swarm(run: RunSpec, alice_dht: Dht) -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(run, alice_dht, stack)


# --- honest peers ---------------------------------------------------------------------------------


async def test_a_peer_without_tcp_is_reached_and_messages_go_both_ways(swarm, alice_dht, bob_dht) -> None:
    served: list[tuple[str, str, str | None]] = []

    async def service(link: Link) -> None:
        served.append((link.peer, link.via, link.proven))
        await echo(link)

    await swarm.serve(alice_dht, service)
    dialler = swarm.dialler(bob_dht)
    link = await dialler.dial(closed(alice_dht), "transfer")
    assert (link.peer, link.via) == (alice_dht.peer, "libp2p")
    assert served == [(bob_dht.peer, "libp2p", bob_dht.peer)]
    big = Chunk(index=1, data=os.urandom(CHUNK_BYTES))
    before = dialler.traffic.sent

    async def send() -> None:
        for _ in range(8):
            await link.send(big)

    sending = asyncio.ensure_future(send())
    assert all([await link.receive(10) == big for _ in range(8)])
    await sending
    assert dialler.traffic.sent - before == 8 * len(frame(big)) > 8 * 1024 * 1024
    await link.send(WANT)
    assert await link.receive(10) == WANT
    await link.close()


async def test_peers_that_have_never_met_find_each_other(swarm, alice_dht) -> None:
    """Each knows only a third; libp2p asks that for addresses."""
    carol, dave = await swarm.dht(), await swarm.dht()
    await swarm.serve(carol)
    link = await swarm.link(dave, carol)
    await link.send(WANT)
    assert await link.receive(10) == WANT


async def test_tcp_comes_first(swarm, alice_dht, bob_dht) -> None:
    server = await swarm.serve(alice_dht)
    address = closed(alice_dht).model_copy(update={"port": server.port})
    link = await swarm.dialler(bob_dht).dial(address, "hop")
    assert link.via == "tcp"
    await link.close()


async def test_stop_tells_the_peers_and_takes_no_more(swarm, alice_dht, bob_dht) -> None:
    server = await swarm.serve(alice_dht)
    link = await swarm.link(bob_dht, alice_dht)
    await server.stop()
    assert await link.receive(10) == Error(code=ErrorCode.LEAVING)
    with pytest.raises(LinkFailed, match=r"over libp2p: it (takes no links of this run|closed)"):
        await swarm.link(bob_dht, alice_dht)
    await swarm.serve(alice_dht)
    await swarm.link(bob_dht, alice_dht)


# --- who may come in ------------------------------------------------------------------------------


async def test_wrong_run(swarm, alice_dht, bob_dht) -> None:
    """A peer of another run has no such name; who calls by the right one is told."""
    await swarm.serve(alice_dht)
    with pytest.raises(LinkFailed, match="takes no links of this run"):
        await swarm.dialler(bob_dht, run_id="0" * 16).dial(closed(alice_dht), "hop")
    stream = await swarm.stranger(bob_dht, alice_dht)
    hello = await read_message(stream)
    assert isinstance(hello, Hello) and hello.run == swarm.run.run_id
    stream.writer.write(frame(greeting(hello, bob_dht.identity, run="0" * 16)))
    answer = await read_message(stream)
    assert isinstance(answer, Error) and answer.code is ErrorCode.WRONG_RUN
    assert await at_its_end(stream)


async def test_who_greets_must_be_who_libp2p_knows(swarm, alice_dht, bob_dht) -> None:
    """Also with a good signature: who lends out a key does not lend out a name."""
    await swarm.serve(alice_dht)
    other = ephemeral_identity()
    with pytest.raises(LinkFailed, match=f"connection is from {bob_dht.peer}") as failed:
        await swarm.dialler(bob_dht, other).dial(closed(alice_dht), "hop")
    assert failed.value.code is ErrorCode.NOT_AUTHENTIC
    await swarm.link(bob_dht, alice_dht)


async def test_only_the_round_is_for_listed_peers(swarm, run, alice_dht, bob_dht) -> None:
    swarm.run = RunSpec.model_validate(run.model_dump() | {"access": [alice_dht.peer]})
    await swarm.serve(alice_dht)
    with pytest.raises(LinkFailed) as failed:
        await swarm.dialler(bob_dht).dial(closed(alice_dht), "round")
    assert failed.value.code is ErrorCode.NOT_ALLOWED


async def test_one_peer_cannot_take_all_links(swarm, alice_dht, bob_dht) -> None:
    """Whichever way they come."""
    server = await swarm.serve(alice_dht, max_per_peer=2)
    dialler = swarm.dialler(bob_dht)
    held = [
        await dialler.dial(closed(alice_dht), "transfer"),
        await dialler.dial(closed(alice_dht).model_copy(update={"port": server.port}), "transfer"),
    ]
    assert [link.via for link in held] == ["libp2p", "tcp"]
    with pytest.raises(LinkFailed) as failed:
        await dialler.dial(closed(alice_dht), "transfer")
    assert failed.value.code is ErrorCode.BUSY
    await held[0].close()
    await dial_when_free(dialler, closed(alice_dht))
    held[1].abort()


async def test_strangers_of_one_address_over_libp2p_are_limited_too(swarm, alice_dht, bob_dht) -> None:
    await swarm.serve(alice_dht, handshake_timeout=60.0, max_strangers=1)
    silent = await swarm.stranger(bob_dht, alice_dht)
    await read_message(silent)  # and never an answer to it
    assert await at_its_end(await swarm.stranger(bob_dht, alice_dht))
    silent.writer.transport.abort()
    link = await dial_when_free(swarm.dialler(bob_dht), closed(alice_dht))
    await link.send(WANT)
    assert await link.receive(10) == WANT
    link.abort()


async def test_made_up_identities_over_libp2p_count_by_address_too(swarm, alice_dht, bob_dht) -> None:
    """Together with those over TCP: all of them come from this machine."""
    server = await swarm.serve(alice_dht, max_connections=4)
    address = closed(alice_dht).model_copy(update={"port": server.port})
    held = [await swarm.link(bob_dht, alice_dht), await swarm.dialler(bob_dht).dial(address, "transfer")]
    assert [link.via for link in held] == ["libp2p", "tcp"]
    with pytest.raises(LinkFailed, match="one address") as failed:
        await swarm.link(bob_dht, alice_dht)
    assert failed.value.code is ErrorCode.BUSY
    held[1].abort()


async def test_a_full_server_turns_others_away(swarm, alice_dht, bob_dht) -> None:
    await swarm.serve(alice_dht, max_connections=1)
    link = await swarm.link(bob_dht, alice_dht)
    assert await at_its_end(await swarm.stranger(bob_dht, alice_dht))
    await link.send(WANT)
    assert await link.receive(10) == WANT


# --- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        HEADER.pack(0),
        struct.pack(">I", 0xFFFF_FFFF) + b"x" * 100,
        HEADER.pack(5 * 1024 * 1024),
    ],
    ids=["http", "no-msgpack", "empty", "4-gib", "oversize"],
)
async def test_garbage_closes_its_own_stream_only(swarm, alice_dht, bob_dht, sent) -> None:
    await swarm.serve(alice_dht)
    honest = await swarm.link(bob_dht, alice_dht)
    stream = await swarm.stranger(bob_dht, alice_dht)
    await read_message(stream)
    stream.writer.write(sent)
    answer = await read_message(stream)
    assert isinstance(answer, Error)
    assert answer.code in (ErrorCode.MALFORMED, ErrorCode.TOO_LARGE)
    assert await at_its_end(stream)
    await honest.send(WANT)
    assert await honest.receive(10) == WANT


async def test_garbage_after_the_handshake(swarm, alice_dht, bob_dht) -> None:
    await swarm.serve(alice_dht)
    link = await swarm.link(bob_dht, alice_dht)
    link._writer.write(struct.pack(">I", 0x7FFF_FFFF) + b"x" * 100)
    answer = await link.receive(10)
    assert isinstance(answer, Error) and answer.code is ErrorCode.TOO_LARGE
    with pytest.raises(LinkClosed):
        await link.receive(PROMPTLY)
    await swarm.link(bob_dht, alice_dht)


async def test_a_server_that_sends_garbage(swarm, alice_dht, bob_dht) -> None:
    def garbage(stream: Stream) -> None:
        stream.writer.write(struct.pack(">I", 0x7FFF_FFFF))

    name = link_name(swarm.run.run_id)
    await alice_dht.streams.serve(name, garbage)
    swarm.stack.push_async_callback(alice_dht.streams.stop_serving, name)
    with pytest.raises(LinkFailed) as failed:
        await swarm.link(bob_dht, alice_dht)
    assert failed.value.code is ErrorCode.TOO_LARGE


async def test_who_says_nothing_is_dropped(swarm, alice_dht, bob_dht) -> None:
    await swarm.serve(alice_dht, handshake_timeout=0.3, max_connections=1)
    stream = await swarm.stranger(bob_dht, alice_dht)
    await read_message(stream)
    answer = await read_message(stream)
    assert isinstance(answer, Error) and answer.code is ErrorCode.TIMED_OUT
    assert await at_its_end(stream)
    await dial_when_free(swarm.dialler(bob_dht), closed(alice_dht))


# --- links that end -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_client_ends_it(swarm, alice_dht, bob_dht, how) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def service(link: Link) -> None:
        try:
            await link.receive()
        except LinkClosed:
            ended.put_nowait(link.peer)
            raise

    await swarm.serve(alice_dht, service)
    link = await swarm.link(bob_dht, alice_dht)
    if how == "close":
        await link.close()
    else:
        link.abort()
    async with asyncio.timeout(PROMPTLY):
        assert await ended.get() == bob_dht.peer
    with pytest.raises(LinkClosed):
        await link.send(WANT)


@pytest.mark.parametrize("how", ["close", "abort", "return"])
async def test_the_server_ends_it(swarm, alice_dht, bob_dht, how) -> None:
    async def service(link: Link) -> None:
        await link.send(WANT)
        if how == "close":
            await link.close()
        elif how == "abort":
            link.abort()

    await swarm.serve(alice_dht, service)
    link = await swarm.link(bob_dht, alice_dht)
    if how != "abort":  # an abort may overtake what was sent before
        assert await link.receive(10) == WANT
    with pytest.raises(LinkClosed):
        while True:
            await link.receive(PROMPTLY)
    async with asyncio.timeout(PROMPTLY):
        with pytest.raises(LinkClosed):
            while True:
                await link.send(Chunk(index=0, data=bytes(CHUNK_BYTES)))


async def test_who_is_sending_notices_too(swarm, alice_dht, bob_dht) -> None:
    """A server that no longer reads, and then is gone: what waits in the pipe is no reason to wait on."""
    full = asyncio.Event()

    async def deaf(link: Link) -> None:
        link._reader._transport.pause_reading()  # type: ignore[attr-defined]
        await full.wait()
        link.abort()

    await swarm.serve(alice_dht, deaf)
    link = await swarm.link(bob_dht, alice_dht)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            await link.send(Chunk(index=0, data=bytes(CHUNK_BYTES)), timeout=0.3)
    sending = asyncio.ensure_future(link.send(Chunk(index=0, data=bytes(CHUNK_BYTES))))
    await asyncio.sleep(0.1)
    full.set()
    with pytest.raises(LinkClosed):
        async with asyncio.timeout(PROMPTLY):
            await sending


async def test_closing_does_not_wait_for_a_peer_that_never_reads(swarm, alice_dht, bob_dht) -> None:
    hold = asyncio.Event()

    async def deaf(link: Link) -> None:
        link._reader._transport.pause_reading()  # type: ignore[attr-defined]
        await hold.wait()

    await swarm.serve(alice_dht, deaf)
    link = await swarm.link(bob_dht, alice_dht)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            await link.send(Chunk(index=0, data=bytes(CHUNK_BYTES)), timeout=0.2)
    async with asyncio.timeout(5 * CLOSE_TIMEOUT):
        await link.close()
    hold.set()


# --- a daemon that dies ---------------------------------------------------------------------------


async def test_a_service_that_comes_while_a_daemon_is_attached_is_served_too() -> None:
    streams, told = DaemonStreams(), []

    class Daemon:
        async def add_binary_stream_handler(self, name: str, _handler: object) -> None:
            told.append(name)
            if name == "hop":
                await streams.serve("round", lambda stream: None)
                await streams.stop_serving("hop")

    await streams.serve("hop", lambda stream: None)
    await streams.attach(Daemon())
    assert told == ["hop", "round"]


async def test_a_server_whose_daemon_dies_is_reached_again(swarm, bob_dht) -> None:
    carol = await swarm.dht()
    await swarm.serve(carol)
    link = await swarm.link(bob_dht, carol)
    watch = asyncio.ensure_future(carol.watch())
    try:
        os.kill(carol._p2p._child.pid, signal.SIGKILL)
        with pytest.raises(LinkClosed):
            await link.receive(PROMPTLY)
        link = await dial_when_free(swarm.dialler(bob_dht), closed(carol))
        await link.send(WANT)
        assert await link.receive(10) == WANT
        await link.close()
    finally:
        watch.cancel()


async def test_a_client_whose_daemon_dies_dials_again(swarm, alice_dht) -> None:
    await swarm.serve(alice_dht)
    carol = await swarm.dht(client_mode=True)
    link = await swarm.link(carol, alice_dht)
    os.kill(carol._p2p._child.pid, signal.SIGKILL)
    with pytest.raises(LinkClosed):
        await link.receive(PROMPTLY)
    with pytest.raises(LinkFailed, match="refused; over libp2p: the libp2p daemon"):
        await swarm.link(carol, alice_dht)
    watch = asyncio.ensure_future(carol.watch())
    try:
        link = await dial_when_free(swarm.dialler(carol), closed(alice_dht))
        await link.send(WANT)
        assert await link.receive(10) == WANT
        await link.close()
    finally:
        watch.cancel()


# --- which way ------------------------------------------------------------------------------------


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A firewall that swallows everything: the hosts to which TCP was tried in vain."""
    tried: list[str] = []

    async def connect(host: str, port: int) -> Any:
        tried.append(host)
        await asyncio.Event().wait()

    monkeypatch.setattr(dialling, "_connect", connect)
    return tried


async def test_after_a_fall_back_libp2p_comes_first(swarm, alice_dht, bob_dht, tcp, monkeypatch) -> None:
    await swarm.serve(alice_dht)
    dialler = swarm.dialler(bob_dht)
    for _ in range(3):
        link = await dialler.dial(closed(alice_dht), "hop", timeout=5.0)
        assert link.via == "libp2p"
        link.abort()
    assert len(tcp) == 1
    elsewhere = closed(alice_dht).model_copy(update={"port": 2})
    (await dialler.dial(elsewhere, "hop", timeout=5.0)).abort()
    assert len(tcp) == 2, "another address deserves another try"
    monkeypatch.setattr(dialling, "REMEMBERED_SECONDS", 0.0)
    dialler = swarm.dialler(bob_dht)
    for _ in range(2):
        (await dialler.dial(closed(alice_dht), "hop", timeout=5.0)).abort()
    assert len(tcp) == 4


async def test_tcp_that_is_back_is_found_when_libp2p_fails(swarm, alice_dht, bob_dht, monkeypatch) -> None:
    server = await swarm.serve(alice_dht)
    address = closed(alice_dht).model_copy(update={"port": server.port})
    dialler = swarm.dialler(bob_dht)
    with monkeypatch.context() as firewall:
        firewall.setattr(dialling, "_connect", refuse)
        link = await dialler.dial(address, "hop")
        assert link.via == "libp2p"
        link.abort()
    await alice_dht.streams.stop_serving(link_name(swarm.run.run_id))
    for _ in range(2):
        link = await dialler.dial(address, "hop")
        assert link.via == "tcp"
        link.abort()
    assert dialler._stream_first == {}


async def refuse(host: str, port: int) -> Any:
    raise ConnectionRefusedError(111, "Connection refused")


async def test_neither_way(swarm, alice_dht, bob_dht) -> None:
    """Nothing is remembered, and both reasons are given."""
    dialler = swarm.dialler(bob_dht)
    nobody = closed(alice_dht).model_copy(update={"peer": ephemeral_identity().peer})
    for address, cause in [
        (nobody, "no peer knows an address of it"),
        (nobody.model_copy(update={"peer": "0OIl"}), "no peer id"),
        (nobody.model_copy(update={"peer": "abc"}), "over libp2p: "),
        (closed(alice_dht), "takes no links of this run"),
    ]:
        with pytest.raises(
            LinkFailed, match=f"refused; over libp2p: .*{cause}" if cause[0] != "o" else cause
        ):
            await dialler.dial(address, "hop")
    assert dialler._stream_first == {}


async def test_a_wrong_answer_over_tcp_is_an_answer(swarm, bob_dht) -> None:
    """Who reaches somebody else, or is refused, does not try another way."""
    opened: list[str] = []

    class Counted:
        async def open(self, peer: str, name: str, timeout: float) -> Stream:
            opened.append(peer)
            raise StreamFailed("not here")

    dialler = swarm.dialler(bob_dht)
    dialler.streams = Counted()  # type: ignore[assignment]
    alice, stranger = ephemeral_identity(), ephemeral_identity()
    other_run = RunSpec.model_validate(swarm.run.model_dump() | {"name": "another"})
    server = LinkServer(alice, other_run, "127.0.0.1", 0, {"hop": echo}, Traffic())
    await server.start()
    swarm.stack.push_async_callback(server.stop)
    no_tls = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    for peer, port, code in [
        (stranger.peer, server.port, ErrorCode.NOT_AUTHENTIC),
        (alice.peer, server.port, ErrorCode.WRONG_RUN),
        (alice.peer, no_tls.sockets[0].getsockname()[1], None),
    ]:
        with pytest.raises(LinkFailed) as failed:
            await dialler.dial(HopAddress(peer=peer, host="127.0.0.1", port=port), "hop")
        assert failed.value.code is code
    assert opened == []
    no_tls.close()


async def test_streams_that_fail_leave_nothing_open(swarm, alice_dht, bob_dht) -> None:
    name = link_name(swarm.run.run_id)
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(20):
        with pytest.raises(StreamFailed):
            await bob_dht.streams.open(alice_dht.peer, name, 10)
        with pytest.raises(TimeoutError):
            await bob_dht.streams.open(ephemeral_identity().peer, name, 0.0)
    async with asyncio.timeout(PROMPTLY):
        while process.num_fds() > before + 2:  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.02)


# --- helpers --------------------------------------------------------------------------------------


def greeting(hello: Hello, identity: Identity, **changed: Any) -> Greeting:
    fields = {
        "version": hello.newest,
        "run": hello.run,
        "service": "hop",
        "peer": identity.peer,
        "signature": sign_bytes(identity.key, "greeting", hello.peer.encode() + hello.nonce),
    }
    return Greeting.model_validate(fields | changed)


async def dial_when_free(dialler: Dialler, address: HopAddress, seconds: float = 30.0) -> Link:
    """Dial again and again: a link counts until its server has seen it end, and a daemon takes its time."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return await dialler.dial(address, "transfer")
            except (LinkFailed, WireError):
                await asyncio.sleep(0.05)
