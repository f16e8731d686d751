"""Links between real sockets, and what strangers may try on the port."""

import asyncio
import gc
import os
import socket
import ssl
import struct
import threading

import pytest

from spheroid_node.errors import PortInUse
from spheroid_node.net.identity import Identity
from spheroid_node.net.link import CLOSE_TIMEOUT, Link, LinkClosed
from spheroid_node.net.links import LinkFailed, LinkServer, Traffic, dial
from spheroid_node.net.tls import client_context
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
    Read,
    Want,
    Welcome,
    decode,
)
from spheroid_node.wire.signing import sign_bytes
from spheroid_node.wire.tensors import CHUNK_BYTES

DIALS = 60


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


async def stranger(address: HopAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """TLS without our protocol."""
    return await asyncio.open_connection(
        address.host, address.port, ssl=client_context(), server_hostname="stranger"
    )


async def read_message(reader: asyncio.StreamReader) -> Message:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return decode(await reader.readexactly(length))


def frame(message: Message) -> bytes:
    body = message.pack()
    return HEADER.pack(len(body)) + body


async def answers(net, address: HopAddress, identity: Identity) -> None:
    """An honest peer is still served."""
    link = await net.dial_when_free(address, identity)
    want = Want(group="block-0", version=3)
    await link.send(want)
    assert await link.receive(10) == want


# --- honest peers ---------------------------------------------------------------------------------


async def test_messages_go_both_ways_and_are_counted(net, alice, bob) -> None:
    address = await net.serve(alice, echo)
    link = await net.dial(address, bob)
    big = Chunk(index=1, data=bytes(CHUNK_BYTES))
    before = net.traffic.sent
    for _ in range(4):
        await link.send(big)
    for _ in range(4):
        assert await link.receive(10) == big
    assert link.peer == alice.peer
    assert net.traffic.sent - before == 4 * len(frame(big))
    assert net.traffic.received > 4 * CHUNK_BYTES


async def test_the_server_knows_who_called(net, alice, bob) -> None:
    seen: list[str] = []

    async def note(link: Link) -> None:
        seen.append(link.peer)

    link = await net.dial(await net.serve(alice, note), bob)
    with pytest.raises(LinkClosed):
        await link.receive(10)
    assert seen == [bob.peer]


async def test_a_receive_that_times_out_loses_nothing(net, alice, bob) -> None:
    """Also in the middle of a frame."""
    go_on = asyncio.Event()

    async def in_two_parts(link: Link) -> None:
        whole = frame(Read(group="block-0", version=1, index=2))
        link._writer.write(whole[:10])
        await go_on.wait()
        link._writer.write(whole[10:])
        await link.receive()

    link = await net.dial(await net.serve(alice, in_two_parts), bob)
    with pytest.raises(TimeoutError):
        await link.receive(0.2)
    go_on.set()
    assert await link.receive(10) == Read(group="block-0", version=1, index=2)


async def test_expect_turns_the_peers_error_into_ours(net, alice, bob) -> None:
    async def refuse(link: Link) -> None:
        await link.send(Error(code=ErrorCode.NOT_FOUND, detail="nothing"))
        await link.send(Welcome())
        await link.receive()

    link = await net.dial(await net.serve(alice, refuse), bob)
    with pytest.raises(WireError, match="nothing") as refused:
        await link.expect(Chunk, 10)
    assert refused.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(WireError, match="Welcome instead of Chunk"):
        await link.expect(Chunk, 10)


async def test_a_service_that_fails_does_not_take_the_server_with_it(net, alice, bob) -> None:
    calls = 0

    async def fail_once(link: Link) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError("a bug")
        await echo(link)

    address = await net.serve(alice, fail_once)
    link = await net.dial(address, bob)
    assert (await link.receive(10)) == Error(code=ErrorCode.INTERNAL)
    await answers(net, address, bob)


async def test_stop_tells_the_peers_and_frees_the_port(net, run, alice, bob) -> None:
    server = LinkServer(alice, run, "127.0.0.1", 0, {"transfer": echo}, Traffic())
    await server.start()
    link = await net.dial(HopAddress(peer=alice.peer, host="127.0.0.1", port=server.port), bob)
    await server.stop()
    assert (await link.receive(10)) == Error(code=ErrorCode.LEAVING)
    again = LinkServer(alice, run, "127.0.0.1", server.port, {"transfer": echo}, Traffic())
    await again.start()
    await again.stop()


async def test_a_taken_port_is_named(net, run, alice) -> None:
    address = await net.serve(alice, echo)
    with pytest.raises(PortInUse, match=f"{address.port}.*--data-port"):
        await LinkServer(alice, run, "127.0.0.1", address.port, {}, Traffic()).start()


# --- who may come in ------------------------------------------------------------------------------


async def test_wrong_certificate(net, alice, bob) -> None:
    address = await net.serve(alice, echo)
    imposter = address.model_copy(update={"peer": bob.peer})
    with pytest.raises(LinkFailed, match="certificate") as failed:
        await net.dial(imposter, bob)
    assert failed.value.code is ErrorCode.NOT_AUTHENTIC


async def test_wrong_run_as_the_client_sees_it(net, alice, bob) -> None:
    address = await net.serve(alice, echo)
    with pytest.raises(LinkFailed, match="run") as failed:
        await dial(address, bob, "0" * 16, "transfer", Traffic())
    assert failed.value.code is ErrorCode.WRONG_RUN


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"run": "0" * 16}, ErrorCode.WRONG_RUN),
        ({"version": 99}, ErrorCode.WRONG_PROTOCOL),
        ({"signature": bytes(64)}, ErrorCode.NOT_AUTHENTIC),
        ({"peer": "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"}, ErrorCode.NOT_AUTHENTIC),
    ],
)
async def test_a_greeting_is_welcomed_or_told_its_fault(net, run, alice, bob, change, code) -> None:
    address = await net.serve(alice, echo)
    reader, writer = await stranger(address)
    hello = await read_message(reader)
    assert isinstance(hello, Hello)
    fields = {
        "version": hello.newest,
        "run": run.run_id,
        "service": "hop",
        "peer": bob.peer,
        "signature": sign_bytes(bob.key, "greeting", hello.peer.encode() + hello.nonce),
    }
    writer.write(frame(Greeting.model_validate(fields | change)))
    answer = await read_message(reader)
    if code is None:
        assert answer == Welcome()
    else:
        assert isinstance(answer, Error) and answer.code is code
        assert await reader.read() == b""
    writer.close()


async def test_a_greeting_for_another_server_does_not_count(net, run, alice, bob) -> None:
    """A server that is greeted cannot pass the greeting on and pose as its client elsewhere."""
    address = await net.serve(alice, echo)
    reader, writer = await stranger(address)
    hello = await read_message(reader)
    assert isinstance(hello, Hello)
    signature = sign_bytes(bob.key, "greeting", bob.peer.encode() + hello.nonce)
    writer.write(
        frame(Greeting(version=1, run=run.run_id, service="hop", peer=bob.peer, signature=signature))
    )
    answer = await read_message(reader)
    assert isinstance(answer, Error) and answer.code is ErrorCode.NOT_AUTHENTIC
    writer.close()


async def test_only_the_round_is_for_listed_peers(net, run, alice, bob) -> None:
    net.run = closed = RunSpec.model_validate(run.model_dump() | {"access": [alice.peer]})
    address = await net.serve(alice, echo, closed)
    with pytest.raises(LinkFailed) as failed:
        await net.dial(address, bob, "round")
    assert failed.value.code is ErrorCode.NOT_ALLOWED
    await net.dial(address, alice, "round")
    await net.dial(address, bob, "transfer")
    await net.dial(address, bob, "hop")


async def test_one_peer_cannot_take_all_links(net, alice, bob) -> None:
    address = await net.serve(alice, echo, max_per_peer=2)
    held = [await net.dial(address, bob) for _ in range(2)]
    with pytest.raises(LinkFailed) as failed:
        await net.dial(address, bob)
    assert failed.value.code is ErrorCode.BUSY
    await net.dial(address, alice)
    await held[0].close()
    await net.dial_when_free(address, bob)


async def test_a_full_server_turns_others_away(net, alice, bob) -> None:
    address = await net.serve(alice, echo, max_connections=1)
    link = await net.dial(address, bob)
    with pytest.raises(LinkFailed):
        await net.dial(address, alice)
    await link.send(Welcome())
    assert await link.receive(10) == Welcome()


# --- strangers on the port ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        HEADER.pack(3) + b"\x93\x01\x02",
        HEADER.pack(12) + b"\x81\xa4type\xa5bogus",
        HEADER.pack(0),
        struct.pack(">I", 0xFFFF_FFFF),
        HEADER.pack(5 * 1024 * 1024),
    ],
    ids=["http", "no-msgpack", "no-map", "unknown-type", "empty", "4-gib", "oversize"],
)
async def test_garbage_closes_its_own_connection_only(net, alice, bob, sent) -> None:
    address = await net.serve(alice, echo)
    honest = await net.dial(address, bob)
    reader, writer = await stranger(address)
    await read_message(reader)
    writer.write(sent)
    answer = await read_message(reader)
    assert isinstance(answer, Error)
    assert answer.code in (ErrorCode.MALFORMED, ErrorCode.TOO_LARGE)
    assert await reader.read() == b""
    writer.close()
    await honest.send(Welcome())
    assert await honest.receive(10) == Welcome()


async def test_garbage_after_the_handshake(net, alice, bob) -> None:
    address = await net.serve(alice, echo)
    link = await net.dial(address, bob)
    link._writer.write(struct.pack(">I", 0x7FFF_FFFF) + b"x" * 100)
    answer = await link.receive(10)
    assert isinstance(answer, Error) and answer.code is ErrorCode.TOO_LARGE
    await answers(net, address, bob)


async def test_no_tls_at_all(net, alice, bob) -> None:
    address = await net.serve(alice, echo)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"\x00" * 64)
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()
    await answers(net, address, bob)


async def test_tls_1_2_is_refused(net, alice) -> None:
    address = await net.serve(alice, echo)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(address.host, address.port, ssl=old, server_hostname="x")


@pytest.mark.parametrize("tls", [False, True], ids=["before-tls", "after-tls"])
async def test_a_client_that_says_nothing_is_dropped(net, alice, bob, tls) -> None:
    address = await net.serve(alice, echo, handshake_timeout=0.3, max_connections=1)
    if tls:
        reader, writer = await stranger(address)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    async with asyncio.timeout(10):
        while await reader.read(4096):
            pass
    writer.close()
    await answers(net, address, bob)


async def test_a_server_that_says_nothing_is_given_up(bob, alice, run) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    address = HopAddress(peer=alice.peer, host="127.0.0.1", port=port)
    with pytest.raises(LinkFailed) as failed:
        await dial(address, bob, run.run_id, "hop", Traffic(), timeout=0.3)
    assert failed.value.code is ErrorCode.TIMED_OUT
    server.close()


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "node\x00.example"])
async def test_a_host_that_is_no_name_is_a_link_that_failed(bob, alice, run, host) -> None:
    with pytest.raises(LinkFailed):
        await dial(HopAddress(peer=bob.peer, host=host, port=1), alice, run.run_id, "hop", Traffic(), 5.0)


async def test_nobody_listens(bob, alice, run) -> None:
    address = HopAddress(peer=alice.peer, host="127.0.0.1", port=1)
    with pytest.raises(LinkFailed, match="refused"):
        await dial(address, bob, run.run_id, "hop", Traffic())


async def test_closing_does_not_wait_for_a_peer_that_never_reads(net, alice, bob) -> None:
    """Neither does sending, past its time-out."""
    hold = asyncio.Event()

    async def deaf(link: Link) -> None:
        link._reader._transport.pause_reading()  # type: ignore[attr-defined]
        await hold.wait()

    link = await net.dial(await net.serve(alice, deaf), bob)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            await link.send(Chunk(index=0, data=bytes(CHUNK_BYTES)), timeout=0.2)
    async with asyncio.timeout(5 * CLOSE_TIMEOUT):
        await link.close()
    with pytest.raises(LinkClosed):
        await link.send(Welcome())
    hold.set()


async def test_a_peer_that_resets_at_once_costs_nobody_a_descriptor(net, alice, bob) -> None:
    """uvloop closes the socket before it knows whose it is; closed twice, it takes another one with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reset = threading.Thread(target=reset_all, args=(listener, DIALS), daemon=True)
        reset.start()
        address = HopAddress(peer=bob.peer, host="127.0.0.1", port=listener.getsockname()[1])
        for _ in range(DIALS):
            with pytest.raises(LinkFailed):
                await net.dial(address, alice)
            # Whatever is opened next gets the numbers that have just become free.
            others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
            await asyncio.sleep(0)
            gc.collect()
            await asyncio.sleep(0.001)
            for descriptor in others:
                os.close(descriptor)  # raises where somebody else has closed it
        reset.join()


def reset_all(listener: socket.socket, count: int) -> None:
    for _ in range(count):
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
