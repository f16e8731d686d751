"""DHT peers on real libp2p daemons, and what attackers try in the DHT."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from benchmarks.wan import Wan
from spheroid_node.errors import (
    ClockWrong,
    DhtFailed,
    MalformedAddress,
    PeersUnreachable,
    PortInUse,
    SeveralRuns,
)
from spheroid_node.net import dht as dht_module
from spheroid_node.net._hivemind import (
    DHTID,
    P2P,
    DHTNode,
    DHTRecord,
    DictionaryDHTValue,
    ValueWithExpiration,
    get_dht_time,
)
from spheroid_node.net.clock import Clock, dht_clock
from spheroid_node.net.daemon import Listening
from spheroid_node.net.dht import Dht
from spheroid_node.net.directory import Directory, find_run
from spheroid_node.net.identity import Identity, ephemeral_identity, load_identity
from spheroid_node.net.keys import Keys
from spheroid_node.net.ports import free_port
from spheroid_node.net.validator import RecordValidator
from spheroid_node.run import ModelSpec, RunSpec
from spheroid_node.wire.frames import pack
from spheroid_node.wire.records import MAX_RECORD_BYTES, manifest_ttl, manifests_key, nodes_key

StartDht = Callable[..., Awaitable[Dht]]
RUN = RunSpec(name="tiny", model=ModelSpec(blocks=3, layers=1, width=8, heads=2, window=16))
KEY = manifests_key(RUN.run_id, "block-0")
"""Bodies of manifests may be long, and live long; what is in them a DHT does not look at."""
TTL = manifest_ttl(RUN.round.period)


@pytest.fixture
async def start() -> AsyncIterator[StartDht]:
    async with AsyncExitStack() as stack:

        async def starter(*peers: Dht, **options: Any) -> Dht:
            addresses = [address for peer in peers for address in peer.addresses]
            identity = options.pop("identity", ephemeral_identity())
            dht = await Dht.start(identity, addresses, **{"run": RUN} | options)
            stack.push_async_callback(dht.stop)
            return dht

        yield starter


class Attacker:
    """A DHT node that checks nothing and stores what it likes."""

    def __init__(self, node: Any, identity: Identity) -> None:
        self.node = node
        self.identity = identity

    async def store_at(
        self, victim: Dht, value: bytes, expiration: float, subkey: Any, **options: Any
    ) -> Any:
        peer = victim._p2p.peer_id
        return await self.node.protocol.call_store(
            peer, [DHTID.generate(source=KEY)], [value], [expiration], subkeys=[subkey], **options
        )

    def signed(self, value: bytes, expiration: float) -> bytes:
        return signed(self.identity, KEY, value, expiration)


def signed(author: Identity, key: str, value: bytes, expiration: float) -> bytes:
    record = DHTRecord(DHTID.generate(source=key).to_bytes(), pack(author.peer), pack(value), expiration)
    return RecordValidator(author.key, Keys()).sign_value(record)


@pytest.fixture
async def attack() -> AsyncIterator[Callable[[Dht], Awaitable[Attacker]]]:
    async with AsyncExitStack() as stack:

        async def attacker(victim: Dht) -> Attacker:
            p2p = await P2P.create(
                initial_peers=victim.addresses, nat_port_map=False, auto_nat=False, use_relay=False
            )
            stack.push_async_callback(p2p.shutdown)
            node = await DHTNode.create(p2p=p2p, initial_peers=victim.addresses)
            return Attacker(node, ephemeral_identity())

        yield attacker


def daemons() -> set[int]:
    """Process ids of the libp2p daemons that are ours."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == "p2pd" and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  the condition is about processes, which set no events
            await asyncio.sleep(0.02)


# --- honest peers ---------------------------------------------------------------------------------


async def test_records_of_all_authors_are_found_by_all(start) -> None:
    first = await start()
    second = await start(first)
    client = await start(first, client_mode=True)
    assert await first.put(KEY, b"one", 60)
    assert await second.put(KEY, b"two", 60)
    assert await client.put(KEY, b"three", 60)
    everything = {first.peer: b"one", second.peer: b"two", client.peer: b"three"}
    for dht in (first, second, client):
        assert await dht.get(KEY) == everything
    assert await second.get(nodes_key(RUN.run_id, 0)) == {}


async def test_a_later_record_replaces_the_authors_earlier_one(start) -> None:
    """Also with a shorter life: the DHT alone would keep the one that expires later."""
    first = await start()
    second = await start(first)
    assert await second.put(KEY, b"old", 600)
    assert await second.put(KEY, b"new", 5)
    assert await second.put(KEY, b"newest", 5)
    assert await first.get(KEY) == {second.peer: b"newest"}


async def test_a_peer_that_cannot_be_dialled_takes_part(start) -> None:
    """It stores nothing for others and hands out no address, but reads and writes as all do."""
    first = await start()
    relayed = await start(first, relay=True, announce="192.0.2.1")
    assert relayed.addresses == [] and relayed._node.protocol.client_mode
    assert await relayed.put(KEY, b"from behind a NAT", 60)
    assert await first.get(KEY) == await relayed.get(KEY) == {relayed.peer: b"from behind a NAT"}


def test_what_the_daemon_is_told() -> None:
    """Relays find their users by the addresses that these announce: none may stand in their place."""
    anywhere = Listening("0.0.0.0", 4001, "192.0.2.1", False, "--port")
    assert anywhere.daemon_arguments()["announce_maddrs"] == ["/ip4/192.0.2.1/tcp/4001"]
    relayed = anywhere._replace(relay=True).daemon_arguments()
    assert relayed["use_relay"] and relayed["use_auto_relay"] and relayed["auto_nat"]
    assert relayed["force_reachability"] == "private" and relayed["dht_mode"] == "client"
    assert "announce_maddrs" not in relayed and "no_listen" not in relayed
    here = anywhere._replace(host="127.0.0.1").daemon_arguments()
    assert not (here["use_relay"] or here["auto_nat"] or here["nat_port_map"])


async def test_publishing_again_does_not_overtake_a_newer_value(start, monkeypatch) -> None:
    dht = await start()
    await dht.put(KEY, b"old", 60)
    stored: list[bytes] = []
    store = dht._node.store

    async def slowly(key: str, value: bytes, *rest: Any, **options: Any) -> Any:
        await asyncio.sleep(0.1 if value == b"old" else 0)
        stored.append(value)
        return await store(key, value, *rest, **options)

    monkeypatch.setattr(dht._node, "store", slowly)
    results = await asyncio.gather(dht._republish(), dht.put(KEY, b"new", 60), dht._republish())
    assert results[1] is True
    assert stored == [b"old", b"new", b"new"]
    assert await dht.get(KEY) == {dht.peer: b"new"}


async def test_a_record_ends(start, monkeypatch) -> None:
    dht = await start()
    assert await dht.put(KEY, b"short", 0.2)
    async with asyncio.timeout(10):
        while await dht.get(KEY):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_same_key_file_is_the_same_peer_at_the_same_address(start, tmp_path) -> None:
    identity = load_identity(tmp_path / "identity.key")
    dht = await start(identity=identity)
    address, port = dht.local_address, int(dht.addresses[0].split("/")[4])
    assert dht.addresses == [address] and identity.peer in address
    await dht.stop()
    again = await start(identity=identity, port=port)
    assert again.addresses == [address]


async def test_stop_leaves_no_process_and_no_file(start, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = daemons()
    dht = await start()
    assert daemons() > before
    assert list(tmp_path.iterdir()) == []
    await dht.stop()
    await dht.stop()
    assert daemons() == before


# --- a start that cannot succeed ------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "/ip4/300.0.0.1/tcp/1/p2p/12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X",
        "/ip4/1.2.3.4/tcp/1",
        "",
    ],
)
async def test_a_malformed_address_is_shown(address) -> None:
    with pytest.raises(MalformedAddress) as error:
        await Dht.start(ephemeral_identity(), [address])
    assert repr(address) in str(error.value)


async def test_nobody_at_the_address() -> None:
    before = daemons()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{ephemeral_identity().peer}"
        with pytest.raises(PeersUnreachable, match=f"{port}: connection refused") as error:
            await Dht.start(ephemeral_identity(), [address])
    assert address in str(error.value)
    assert daemons() == before


async def test_somebody_else_at_the_address(start) -> None:
    other = await start()
    address = other.addresses[0].replace(other.peer, ephemeral_identity().peer)
    with pytest.raises(PeersUnreachable, match="not the peer named"):
        await Dht.start(ephemeral_identity(), [address])


async def test_a_peer_that_is_no_dht(start) -> None:
    before = daemons()
    p2p = await P2P.create(nat_port_map=False, auto_nat=False, use_relay=False)
    try:
        [address] = [str(address) for address in await p2p.get_visible_maddrs()]
        with pytest.raises(PeersUnreachable, match="no DHT peer answered"):
            await Dht.start(ephemeral_identity(), [address])
    finally:
        await p2p.shutdown()
    assert daemons() == before


async def test_a_port_held_by_any_program(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=f"{port}.*--dht-port"):
            await Dht.start(ephemeral_identity(), port=port, option="--dht-port")


async def test_a_port_held_by_another_daemon(start) -> None:
    """libp2p alone would share it and lose half of the connections."""
    other = await start()
    with pytest.raises(PortInUse):
        await Dht.start(ephemeral_identity(), port=other.listening.port)


async def test_a_cancelled_start_leaves_no_process(monkeypatch) -> None:
    hangs = asyncio.Event()

    async def never_ready(self: Any, ready: Any) -> None:
        hangs.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(P2P, "_read_outputs", never_ready)
    before = daemons()
    starting = asyncio.ensure_future(Dht.start(ephemeral_identity()))
    await hangs.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert daemons() == before


# --- a daemon that dies ---------------------------------------------------------------------------


async def test_a_dead_daemon_is_replaced(start) -> None:
    first = await start()
    second = await start(first)
    watch = asyncio.ensure_future(second.watch())
    try:
        await second.put(KEY, b"before", 60)
        address, old = second.addresses, second._p2p._child.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: second._p2p is not None and second._p2p._child.pid != old)
        assert await second.get(KEY) == {second.peer: b"before"}
        assert await second.put(KEY, b"after", 60)
        assert await first.put(KEY, b"first", 60)
        assert await second.get(KEY) == await first.get(KEY) == {second.peer: b"after", first.peer: b"first"}
        assert second.addresses == address
    finally:
        watch.cancel()


async def test_all_peers_gone_and_back(start, tmp_path, monkeypatch) -> None:
    """A node whose bootstrap and daemon both died goes on alone, and finds the bootstrap when it is back."""
    monkeypatch.setattr(dht_module, "GREET_INTERVAL", 0.2)
    identity = load_identity(tmp_path / "identity.key")
    bootstrap = await start(identity=identity)
    port = bootstrap.listening.port
    node = await start(bootstrap)
    watch = asyncio.ensure_future(node.watch())
    try:
        await bootstrap.stop()
        old = node._p2p._child.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: node._p2p is not None and node._p2p._child.pid != old)
        assert await node.put(KEY, b"alone", 60)
        bootstrap = await start(identity=identity, port=port)
        async with asyncio.timeout(30):
            while await bootstrap.get(KEY) != {node.peer: b"alone"}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        watch.cancel()


async def test_a_peer_that_has_lost_all_finds_those_it_has_met(start, tmp_path, monkeypatch) -> None:
    """Its bootstrap is gone for good. It says that it is alone, and when it is no more."""
    monkeypatch.setattr(dht_module, "FIRST_GREETING", 0.2)
    monkeypatch.setattr(dht_module, "GREET_INTERVAL", 0.2)
    monkeypatch.setattr(dht_module, "ISOLATED_INTERVAL", 0.2)
    identity = load_identity(tmp_path / "identity.key")
    bootstrap = await start()
    other = await start(bootstrap, identity=identity)
    node = await start(bootstrap)
    watch = asyncio.ensure_future(node.watch())
    try:
        await until(lambda: other.peer in node.contacts.by_peer)
        with capture_logs() as logs:
            await bootstrap.stop()
            await other.stop()
            await until(lambda: node.isolated)
            assert await node.put(KEY, b"alone", 60)
            other = await start(identity=identity, port=other.listening.port)
            async with asyncio.timeout(30):
                while await other.get(KEY) != {node.peer: b"alone"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await until(lambda: not node.isolated)
            await until(lambda: node.orphaned)
            events = [entry["event"] for entry in logs]
            assert events.count("dht.isolated") == events.count("dht.reconnected") == 1
            assert events.count("dht.bootstraps_gone") == 1 and "bootstrap" in node.note
            await start(other, identity=bootstrap.identity, port=bootstrap.listening.port)
            await until(lambda: not node.orphaned)
        assert [entry["event"] for entry in logs].count("dht.bootstrap_back") == 1
        assert node.note == ""
    finally:
        watch.cancel()


async def test_who_has_met_a_swarm_enters_without_its_bootstrap(start, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(dht_module, "FIRST_GREETING", 0.2)
    bootstrap = await start()
    other = await start(bootstrap)
    file = tmp_path / "peers.json"
    node = await start(bootstrap, contacts=file)
    watch = asyncio.ensure_future(node.watch())
    await until(lambda: file.exists() and other.peer in file.read_text())
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    gone = bootstrap.addresses
    for dht in (node, bootstrap):
        await dht.stop()
    with pytest.raises(PeersUnreachable):
        await Dht.start(ephemeral_identity(), gone)
    again = await Dht.start(node.identity, gone, contacts=file, run=RUN)
    try:
        assert await other.put(KEY, b"still here", 60)
        assert await again.get(KEY) == {other.peer: b"still here"}
    finally:
        await again.stop()


async def test_another_address_of_this_machine_is_noticed(start, monkeypatch) -> None:
    """The daemon is replaced, as its connections are dead. Without any address it waits for one."""
    place: list[str | None] = ["192.0.2.7"]
    monkeypatch.setattr(dht_module, "outgoing_address", lambda: place[0])
    monkeypatch.setattr(dht_module, "LOOK_INTERVAL", 0.05)
    first = await start()
    node = await start(first, host="0.0.0.0")
    watch = asyncio.ensure_future(node.watch())
    try:
        await node.put(KEY, b"value", 60)
        old = node._p2p._child.pid
        with capture_logs() as logs:
            for now in (None, "192.0.2.7", None):
                place[0] = now
                await asyncio.sleep(0.2)
            assert node._p2p._child.pid == old
            place[0] = "198.51.100.7"
            await until(lambda: node._p2p is not None and node._p2p._child.pid != old)
            assert await node.get(KEY) == {node.peer: b"value"}
        [told] = [entry for entry in logs if entry["event"] == "dht.address_changed"]
        assert (told["before"], told["now"]) == ("192.0.2.7", "198.51.100.7")
    finally:
        watch.cancel()


async def test_a_peer_that_is_away_is_not_dialled(start, monkeypatch, tmp_path) -> None:
    """libp2p would wait longer after each failure, and not notice that the peer is back."""
    identity = load_identity(tmp_path / "identity.key")
    bootstrap = await start(identity=identity)
    node = await start(bootstrap)
    dialled: list[str] = []
    connect = node._p2p._client.connect

    async def counted(peer: Any, addresses: Any) -> None:
        dialled.append(peer.to_base58())
        await connect(peer, addresses)

    monkeypatch.setattr(node._p2p._client, "connect", counted)
    await bootstrap.stop()
    async with asyncio.timeout(20):
        while await node._p2p.list_peers():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await node._greet()
    assert dialled == []
    await start(identity=identity, port=bootstrap.listening.port)
    await node._greet()
    assert dialled == [identity.peer]


async def test_requests_to_a_dead_daemon_end(start, monkeypatch) -> None:
    monkeypatch.setattr(dht_module, "REQUEST_TIMEOUT", 1.0)
    first = await start()
    second = await start(first)
    os.kill(second._p2p._child.pid, signal.SIGKILL)
    await second._p2p._child.wait()
    async with asyncio.timeout(60):
        await second.put(KEY, b"value", 60)
        await second.get(KEY)
        await second.stop()


# --- attackers ------------------------------------------------------------------------------------


async def test_forged_record(start, attack) -> None:
    victim = await start()
    await victim.put(KEY, b"true", 60)
    attacker = await attack(victim)
    forged = attacker.signed(b"forged", get_dht_time() + 600)
    assert await attacker.store_at(victim, forged, get_dht_time() + 600, victim.peer) == [False]
    assert await victim.get(KEY) == {victim.peer: b"true"}


async def test_an_old_record_that_is_sent_again(start, attack) -> None:
    """Whoever has seen a record can send it again, signature and all: it replaces no newer one."""
    victim = await start()
    reader = await start(victim)
    await victim.put(KEY, b"old", 60)
    key = DHTID.generate(source=KEY)
    dictionary = victim._node.protocol.storage.get(key).value
    [[_, (old, expiration)]] = dictionary.items()
    await victim.put(KEY, b"new", 60)
    attacker = await attack(victim)
    for holder in (victim, reader):
        assert await attacker.store_at(holder, old, expiration, victim.peer) == [False]
    assert await reader.get(KEY) == await victim.get(KEY) == {victim.peer: b"new"}


async def test_wiping_a_key(start, attack) -> None:
    """A plain value, or a whole dictionary, in the place of everyone's records."""
    victim = await start()
    await victim.put(KEY, b"true", 60)
    attacker = await attack(victim)
    late = get_dht_time() + 600
    assert await attacker.store_at(victim, attacker.signed(b"x", late), late, None) == [False]
    dictionary = DictionaryDHTValue()
    dictionary.store("anyone", pack(b"x"), late)
    assert await attacker.store_at(victim, dictionary, late, None) == [False]
    assert await victim.get(KEY) == {victim.peer: b"true"}
    assert await victim.put(KEY, b"still", 60)


async def test_far_expiry_and_oversize(start, attack) -> None:
    victim = await start()
    attacker = await attack(victim)
    mine = attacker.identity.peer
    far, soon = get_dht_time() + 2 * TTL, get_dht_time() + 60
    assert await attacker.store_at(victim, attacker.signed(b"x", far), far, mine) == [False]
    huge = attacker.signed(bytes(MAX_RECORD_BYTES + 1), soon)
    assert await attacker.store_at(victim, huge, soon, mine) == [False]
    assert await attacker.store_at(victim, attacker.signed(b"x", soon), soon, mine) == [True]
    assert await victim.get(KEY) == {mine: b"x"}


async def test_keys_that_no_run_has(start, attack) -> None:
    """Whatever its author signs: under keys that nobody reads, it would only fill the memory."""
    victim = await start()
    assert not await victim.put("spheroid/1/x", b"x", 30)
    attacker = await attack(victim)
    soon, author = get_dht_time() + 30, attacker.identity
    for key, ok in (
        ("spheroid/1/x", False),
        (nodes_key("0" * 16, 0), False),
        (nodes_key(RUN.run_id, 0), True),
    ):
        record = signed(author, key, b"x", soon)
        ids = [DHTID.generate(source=key)]
        stored = await attacker.node.protocol.call_store(
            victim._p2p.peer_id, ids, [record], soon, subkeys=[author.peer]
        )
        assert stored == [ok], key


async def test_a_peer_that_does_not_know_its_run_yet_looks_it_up(start) -> None:
    """Until then it reads and stores nothing of it, and a peer that it turns away has it elsewhere."""
    first = await start()
    joiner = await start(first, run=None)
    assert await first.put(KEY, b"value", 60)
    assert await joiner.get(KEY) == {}
    assert await Directory(first, RUN).publish_run()
    assert await find_run(joiner) == RUN
    assert joiner._node.protocol.storage.get(DHTID.generate(source=KEY)) is None
    assert await joiner.get(KEY) == {first.peer: b"value"}
    assert await joiner.put(KEY, b"mine", 60)
    assert await first.get(KEY) == {first.peer: b"value", joiner.peer: b"mine"}


async def test_peers_of_two_runs_on_one_dht(start) -> None:
    """They hold nothing for each other; with few peers each still finds its own."""
    other = RUN.model_copy(update={"seed": 1})
    ours = await start()
    theirs = await start(ours, run=other)
    assert await Directory(ours, RUN).publish_run() and await Directory(theirs, other).publish_run()
    assert await theirs.put(nodes_key(other.run_id, 0), b"theirs", 30)
    assert ours._node.protocol.storage.get(DHTID.generate(source=nodes_key(other.run_id, 0))) is None
    joiner = await start(ours, run=None)
    with pytest.raises(SeveralRuns):
        await find_run(joiner)
    assert await find_run(joiner, other.run_id) == other
    assert await joiner.get(nodes_key(other.run_id, 0)) == {theirs.peer: b"theirs"}


async def test_a_flood_of_made_up_authors(start, attack) -> None:
    """More than fits into a message of libp2p: those who were there stay, and all is read as before."""
    victim = await start()
    reader = await start(victim, client_mode=True)
    key, block = nodes_key(RUN.run_id, 0), DHTID.generate(source=nodes_key(RUN.run_id, 0))
    assert await victim.put(key, b"true", 45)
    attacker = await attack(victim)
    authors = [ephemeral_identity() for _ in range(800)]
    taken: list[bool] = []
    for start_at in range(0, len(authors), 100):
        batch, soon = authors[start_at : start_at + 100], get_dht_time() + 90
        taken += await attacker.node.protocol.call_store(
            victim._p2p.peer_id, [block] * len(batch), [signed(a, key, bytes(4000), soon) for a in batch],
            soon, subkeys=[author.peer for author in batch],
        )  # fmt: skip
    assert True in taken and False in taken
    assert (await reader.get(key))[victim.peer] == b"true"
    assert await victim.put(key, bytes(4000), 45), "its own record may grow, too"
    assert (await reader.get(key))[victim.peer] == bytes(4000)


async def test_a_clock_that_is_set_back_takes_no_record_with_it(start, monkeypatch) -> None:
    """What was to expire by the clock before, nobody keeps by the clock after; and it hides nothing new."""
    first = await start()
    second = await start(first)
    monkeypatch.setattr(dht_clock, "offset", 7200.0)
    assert await second.put(KEY, b"before", 60)
    monkeypatch.setattr(dht_clock, "offset", 0.0)
    assert await second.put(KEY, b"after", 60)
    assert await first.get(KEY) == await second.get(KEY) == {second.peer: b"after"}


async def test_hiding_records_behind_a_cached_one(start, attack) -> None:
    """A node's cache would answer for its storage: one valid record in it hides all others."""
    victim = await start()
    reader = await start(victim, client_mode=True)
    await victim.put(KEY, b"true", 60)
    attacker = await attack(victim)
    attacker.node.protocol.storage.get = lambda key: None
    late = get_dht_time() + TTL
    mine = attacker.signed(b"x", late)
    await attacker.store_at(victim, mine, late, attacker.identity.peer, in_cache=True)
    assert (await reader.get(KEY))[victim.peer] == b"true"


async def test_a_lying_holder(start, attack) -> None:
    """It is asked first, and answers with an endless life, one bad record and types that no storage has."""
    victim = await start()
    await victim.put(KEY, b"true", 60)
    reader = await start(victim, client_mode=True)
    attacker = await attack(victim)
    soon = get_dht_time() + 60
    lie = DictionaryDHTValue()
    lie.store(attacker.identity.peer, attacker.signed(b"mine", soon), soon)
    lie.store(victim.peer, pack(b"forged") + bytes(64), get_dht_time() + 600)
    lie.maxsize, lie.latest_expiration_time, lie.frozen = 1, math.inf, True
    attacker.node.protocol.storage.get = lambda key: ValueWithExpiration(lie, math.inf)
    table = reader._node.protocol.routing_table
    del table[victim._node.node_id]
    table.add_or_update_node(attacker.node.node_id, attacker.node.peer_id)
    assert await reader.get(KEY) == {victim.peer: b"true", attacker.identity.peer: b"mine"}


async def test_hivemind_follows_our_clock(start, monkeypatch) -> None:
    """In every module that knows of DHT time: one left behind would judge by another clock."""
    monkeypatch.setattr(dht_clock, "offset", 600.0)
    knowing = {
        name: module.get_dht_time
        for name, module in sys.modules.items()
        if name.startswith("hivemind") and hasattr(module, "get_dht_time")
    }
    assert {"hivemind.dht.protocol", "hivemind.utils.timed_storage"} <= set(knowing)
    for name, reading in knowing.items():
        assert abs(reading() - time.time() - 600) < 60, name
    first = await start()
    assert await first.put(KEY, b"soon", 60)
    [[_, held]] = first._node.protocol.storage.get(DHTID.generate(source=KEY)).value.items()
    assert abs(held.expiration_time - time.time() - 660) < 30


class Shifted:
    """What a peer says of the time, changed on its way."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = seconds
        original = dht_module._seconds_ahead

        async def shifted(p2p: Any, peer: Any) -> float | None:
            ahead = await original(p2p, peer)
            assert ahead is not None and abs(ahead - dht_clock.offset) < 1
            return self.seconds

        monkeypatch.setattr(dht_module, "_seconds_ahead", shifted)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of its own for the test, as at the start of a process."""
    fresh = Clock()
    monkeypatch.setattr(dht_clock, "__dict__", fresh.__dict__)
    return dht_clock


@pytest.mark.parametrize("seconds", [600.0, -600.0])
async def test_a_clock_that_is_off_by_minutes_is_put_right(start, clock, monkeypatch, seconds) -> None:
    first = await start()
    clock.__dict__.update(Clock().__dict__)
    Shifted(seconds, monkeypatch)
    with capture_logs() as logs:
        second = await start(first)
    assert second.time() == pytest.approx(time.time() + seconds, abs=5)
    [told] = [entry for entry in logs if entry["event"] == "clock.off"]
    assert told["seconds"] == -seconds and "NTP" in told["remedy"]
    assert await second.put(KEY, b"value", 60)
    assert await second.get(KEY) == {second.peer: b"value"}


async def test_a_clock_that_is_off_by_days_is_an_error(start, clock, monkeypatch) -> None:
    before = daemons()
    first = await start()
    Shifted(-3 * 86_400.0, monkeypatch)
    clock.__dict__.update(Clock().__dict__)
    with pytest.raises(ClockWrong, match="3 days"):
        await Dht.start(ephemeral_identity(), first.addresses)
    await first.stop()
    assert daemons() == before


async def test_a_clock_that_is_set_while_a_peer_runs_is_noticed(start, clock, monkeypatch) -> None:
    first = await start()
    second = await start(first)

    async def as_told_by_a_peer_with_a_clock_of_its_own(p2p: Any, peer: Any) -> float:
        return time.time() - clock.wall()

    monkeypatch.setattr(dht_module, "_seconds_ahead", as_told_by_a_peer_with_a_clock_of_its_own)
    watch = asyncio.ensure_future(second.watch())
    try:
        monkeypatch.setattr(clock, "wall", lambda: time.time() - 300)  # as if it had been set back
        await until(lambda: abs(second.time() - time.time()) < 1)
        assert clock.offset == pytest.approx(300, abs=1)
    finally:
        watch.cancel()


async def test_an_unknown_failure_is_told_as_it_is(monkeypatch) -> None:
    async def broken(**_: Any) -> None:
        raise RuntimeError("the moon is full")

    monkeypatch.setattr(DHTNode, "create", broken)
    before = daemons()
    with pytest.raises(DhtFailed, match="moon"):
        await Dht.start(ephemeral_identity())
    assert daemons() == before


async def test_a_peer_behind_a_router_is_dialled_at_the_routers_port(start: StartDht) -> None:
    inside = free_port("127.0.0.1", 0, "--port")
    async with Wan(delay=0.01) as wan:
        outside = await wan.forward("127.0.0.1", inside)
        hidden = await start(port=inside, announce="127.0.0.1", announce_port=outside)
        assert hidden.listening.port == inside
        assert hidden.addresses == [f"/ip4/127.0.0.1/tcp/{outside}/p2p/{hidden.peer}"]
        other = await start(hidden)
        assert await other.put(KEY, b"through the router", 60)
        assert await hidden.get(KEY) == {other.peer: b"through the router"}
        assert wan.there.carried > 0
