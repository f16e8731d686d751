from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spheroid_node.config import NodeConfig
from spheroid_node.errors import IdentityCopied, NotAllowed
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.streams import Accept, Stream, StreamFailed
from spheroid_node.node.daemon import Node, announced_address, announced_host, run_node
from spheroid_node.node.models import HopModels
from spheroid_node.node.report import RENEW_SECONDS, Report, Reporter
from spheroid_node.node.state import StateDirectory
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import ErrorCode
from spheroid_node.wire.messages import Error, HopAddress, Want
from spheroid_node.wire.records import NODE_TTL

from .conftest import Peer, World


def test_announced_host_is_the_one_given_then_the_one_listened_on(tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path, host="127.0.0.1")
    assert announced_host(config) == "127.0.0.1"
    assert announced_host(config.model_copy(update={"announce": "node.example"})) == "node.example"
    assert announced_host(config.model_copy(update={"host": "0.0.0.0"})) != "0.0.0.0"


def test_the_port_announced_is_the_one_given_then_the_one_listened_on(tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path, host="127.0.0.1", data_port=31339)
    peer = ephemeral_identity().peer
    assert announced_address(config, peer, 31339) == HopAddress(peer=peer, host="127.0.0.1", port=31339)
    forwarded = config.model_copy(update={"announce": "203.0.113.7", "announce_data_port": 443})
    assert announced_address(forwarded, peer, 31339) == HopAddress(peer=peer, host="203.0.113.7", port=443)


def test_hops_are_built_from_exactly_the_versions_asked_for(world: World, tmp_path: Path) -> None:
    peer = Peer(world, 1, tmp_path)
    models = HopModels(world.run, 1, peer.store)
    hop = models.hop_model(0, 0)
    assert hop is not None and hop.index == 1
    assert models.hop_model(0, 0) is hop
    assert models.hop_model(1, 0) is None
    assert models.hop_model(0, 3) is None
    assert not any(parameter.requires_grad for parameter in hop.parameters())


async def test_a_run_of_listed_peers_takes_no_other_node(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it announces anything. Who is on the list comes as far as its trainer."""
    peer = Peer(world, 0, tmp_path)
    listed = RunSpec.model_validate(world.run.model_dump() | {"access": [peer.id]})

    @asynccontextmanager
    async def entered(config: Any, identity: Any, **_: Any) -> AsyncIterator[Any]:
        yield replace(peer.client, run=listed, identity=identity)

    class Trained(Exception):
        pass

    async def started(self: Any) -> None:
        raise Trained

    monkeypatch.setattr("spheroid_node.node.daemon.open_client", entered)
    monkeypatch.setattr("spheroid_node.node.trainer.TrainerProcess.start", started)
    config = NodeConfig(state_dir=tmp_path / "state", host="127.0.0.1")
    with pytest.raises(NotAllowed, match=listed.run_id):
        await run_node(config, 0)
    assert not world.published
    monkeypatch.setattr("spheroid_node.node.daemon.load_identity", lambda path: peer.client.identity)
    with pytest.raises(Trained):
        await run_node(config, 0)


async def test_the_record_follows_the_machines_address(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: list[str | None] = ["192.0.2.7"]
    monkeypatch.setattr("spheroid_node.node.daemon.outgoing_address", lambda: place[0])
    monkeypatch.setattr("spheroid_node.node.daemon.POLL_SECONDS", 0.01)
    with StateDirectory(tmp_path / "state") as state:
        config = NodeConfig(state_dir=tmp_path, host="0.0.0.0")
        client = Peer(world, 0, tmp_path).client
        node = Node(config, client, state, 0, cast(Any, SimpleNamespace(device="cpu")))
        node.server.port = 5
        reporter = Reporter(client, node.store, node.report, announced_address(config, "12D3", 5))
        meters = asyncio.create_task(node._meters(reporter))
        try:
            for now, announced in (
                ("192.0.2.7", "192.0.2.7"),
                (None, "192.0.2.7"),
                ("192.0.2.8", "192.0.2.8"),
            ):
                place[0] = now
                node.report.changed.clear()
                async with asyncio.timeout(5):
                    if announced != reporter.record().host:
                        await node.report.changed.wait()
                    await asyncio.sleep(0.05)
                assert reporter.record().host == announced
        finally:
            meters.cancel()


class MemoryStreams:
    """The libp2p of one peer: a pair of sockets is a stream."""

    def __init__(self, swarm: dict[tuple[str, str], Accept], peer: str) -> None:
        self._swarm, self._peer = swarm, peer

    async def open(self, peer: str, name: str, timeout: float) -> Stream:
        if (peer, name) not in self._swarm:
            raise StreamFailed("it is not there")
        ours, theirs = [await asyncio.open_unix_connection(sock=end) for end in socket.socketpair()]
        self._swarm[peer, name](Stream(self._peer, *theirs))
        return Stream(peer, *ours)

    async def serve(self, name: str, accept: Accept) -> None:
        self._swarm[self._peer, name] = accept

    async def stop_serving(self, name: str) -> None:
        del self._swarm[self._peer, name]


async def test_a_node_serves_and_dials_over_libp2p_too(world: World, tmp_path: Path) -> None:
    swarm: dict[tuple[str, str], Accept] = {}
    one, two = (
        replace(peer.client, streams=MemoryStreams(swarm, peer.id))
        for peer in (Peer(world, block, tmp_path / str(block)) for block in (0, 1))
    )
    with StateDirectory(tmp_path / "state") as state:
        config = NodeConfig(state_dir=tmp_path, host="127.0.0.1", cache_mb=7)
        node = Node(config, one, state, 0, cast(Any, SimpleNamespace(device="cpu")))
        assert node.hops._limits.cache_bytes == 7_000_000
        await node.server.start()
        link = await two.dial(HopAddress(peer=one.identity.peer, host="127.0.0.1", port=1), "transfer")
        assert link.via == "libp2p"
        await link.send(Want(group="block-0", version=9))
        assert await link.receive(10) == Error(code=ErrorCode.NOT_FOUND)
        await link.close()
        await node.server.stop()
    assert not swarm


def reporter(peer: Peer) -> Reporter:
    return Reporter(peer.client, peer.store, Report(peer.block, "cpu"), peer.address)


async def renew(world: World, *reporters: Reporter) -> None:
    """What each of them does every few seconds."""
    for each in reporters:
        await each._check_copy()
        await each.publish()
    world.clock.now += RENEW_SECONDS


@pytest.mark.parametrize("block", [0, 1])
async def test_of_two_nodes_with_one_key_the_later_gives_way(
    world: World, tmp_path: Path, block: int
) -> None:
    peer = Peer(world, 0, tmp_path)
    early, late = reporter(peer), reporter(peer)
    late._started += 5
    late._report.block = block
    with pytest.raises(IdentityCopied, match=peer.id):
        for _ in range(6):
            await renew(world, early, late)
    await early._check_copy()


async def test_a_record_left_by_an_earlier_life_is_no_copy(world: World, tmp_path: Path) -> None:
    peer = Peer(world, 0, tmp_path)
    await reporter(peer).publish()
    again = reporter(peer)
    again._started += 5
    left = world.published[0, peer.id]
    for _ in range(3):  # the DHT may go on giving us the old one until it expires
        await renew(world, again)
        world.published[0, peer.id] = left
    world.clock.now += NODE_TTL
    for _ in range(6):
        await renew(world, again)


def test_the_record_names_what_is_held(world: World, tmp_path: Path) -> None:
    peer = Peer(world, 1, tmp_path)
    record = reporter(peer).record()
    assert {item.group: item.version for item in record.held} == {"block-1": 0, "interface": 0}
    assert (record.block, record.state, record.round) == (1, "joining", -1)


@pytest.mark.parametrize("block", [0, 1])
def test_a_worker_trains_its_block_and_the_interface(run: RunSpec, block: int) -> None:
    assert run.worker_groups(block) == (f"block-{block}", "interface")


HANGING = """
import asyncio, sys, time
from pathlib import Path
from spheroid_node.config import NodeConfig
from spheroid_node.node import daemon
from spheroid_node.node.threads import to_its_end

async def live(config, block, state, stopping):
    stopping.started()
    print("ready", flush=True)
    await stopping.wait()
    hanging = asyncio.ensure_future(to_its_end(time.sleep, 600))
    await asyncio.sleep(0.1)
    print("leaving", flush=True)
    if sys.argv[2] == "a part":
        await hanging

daemon._live = live
daemon.END_SECONDS = float(sys.argv[3])
asyncio.run(daemon.run_node(NodeConfig(state_dir=Path(sys.argv[1])), 0))
"""


@pytest.mark.parametrize(
    ("what", "seconds", "signals", "code"),
    [
        ("a part", 0.5, ["ready"], 0),
        ("a thread", 0.5, ["ready"], 0),
        ("a part", 600, ["ready", "leaving"], 128 + signal.SIGINT),
    ],
)
def test_what_hangs_while_a_node_leaves_does_not_keep_it(
    tmp_path: Path, what: str, seconds: float, signals: list[str], code: int
) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path), what, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for word in signals:
                while process.stdout.readline().strip() != word:
                    assert process.poll() is None
                process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode == code
    assert ("node.left_unfinished" in said) is (code == 0)
    with StateDirectory(tmp_path):
        pass  # nobody holds it any more
