"""The daemon behind ``spheroid-node bootstrap``: a DHT peer that publishes a run."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import structlog

from spheroid_node.config import NodeConfig, address_left, runtime_dir
from spheroid_node.errors import PortInUse
from spheroid_node.net.dht import Dht
from spheroid_node.net.directory import Directory
from spheroid_node.net.identity import Identity, load_identity
from spheroid_node.node.signals import Stopping
from spheroid_node.node.state import StateDirectory
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import write_atomically
from spheroid_node.wire.records import RUN_TTL

log = structlog.get_logger()

JOIN_FILE = "join.txt"
PORT_FILE = "port"


async def run_bootstrap(config: NodeConfig, run: RunSpec) -> None:
    """Publish ``run`` until a signal ends it. The key, and the port unless one is given, are kept.

    Raises the errors of :meth:`Dht.start` and of the state directory.
    """
    async with Stopping() as stopping:
        with StateDirectory(config.state_dir) as state:
            state.check(run)
            dht = await _start(config, load_identity(state.identity), state, run)
            try:
                state.bind(run)
                await _publish_until(stopping, dht, run, state)
            finally:
                await dht.stop()
    log.info("bootstrap.stopped")


async def _publish_until(stopping: Stopping, dht: Dht, run: RunSpec, state: StateDirectory) -> None:
    line = join_line(dht.addresses[0], run)
    write_atomically(state.path / JOIN_FILE, f"{line}\n".encode())
    write_atomically(state.path / PORT_FILE, f"{dht.listening.port}\n".encode())
    directory = Directory(dht, run)
    await directory.publish_run()
    with address_left(runtime_dir(), run.run_id, dht.local_address):
        stopping.started()
        log.info("bootstrap.started", run=run.run_id, address=dht.addresses[0], join=line)
        print(line, flush=True)
        await _serve(dht, directory, stopping)


async def _start(config: NodeConfig, identity: Identity, state: StateDirectory, run: RunSpec) -> Dht:
    """On the port given, else on the one used last time if it is still free, else on any."""
    ports = [config.port] if config.port else [*_kept_port(state.path / PORT_FILE), 0]
    for port in ports[:-1]:
        with suppress(PortInUse):
            return await _listen(config, identity, port, state.contacts, run)
    return await _listen(config, identity, ports[-1], state.contacts, run)


async def _listen(config: NodeConfig, identity: Identity, port: int, contacts: Path, run: RunSpec) -> Dht:
    return await Dht.start(
        identity,
        config.peers,
        host=config.host,
        port=port,
        announce=config.announce,
        announce_port=config.announce_port,
        contacts=contacts,
        run=run,
    )


def _kept_port(file: Path) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(file.read_text())]
    return []


async def _serve(dht: Dht, directory: Directory, stopping: Stopping) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(dht.watch(), name="dht"),
            tasks.create_task(_publish(directory), name="publish"),
        ]
        await stopping.wait()
        for task in running:
            task.cancel()


async def _publish(directory: Directory) -> None:
    while True:
        await asyncio.sleep(RUN_TTL / 3)
        await directory.publish_run()


def join_line(address: str, run: RunSpec) -> str:
    """The command that a volunteer types."""
    return f"spheroid-node join --block auto --run {run.run_id} --peer {address}"
