"""The daemon behind ``spheroid-node join``: start, run, stop."""

from __future__ import annotations

import asyncio
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import structlog
import torch

from spheroid_node.config import LOOPBACK, NodeConfig
from spheroid_node.errors import NotAllowed
from spheroid_node.model.parameters import elements
from spheroid_node.net.clock import dht_clock
from spheroid_node.net.identity import load_identity
from spheroid_node.net.limits import Rates
from spheroid_node.net.link import Link
from spheroid_node.net.links import LinkServer
from spheroid_node.net.ports import outgoing_address
from spheroid_node.net.transfer import serve_transfer
from spheroid_node.node.access import Client, open_client
from spheroid_node.node.collecting import Collector
from spheroid_node.node.models import HopModels
from spheroid_node.node.neighbours import Neighbours
from spheroid_node.node.outbox import Outbox
from spheroid_node.node.placing import Placing, blocks_that_fit, choose_block
from spheroid_node.node.report import Report, Reporter
from spheroid_node.node.screening import TrainerScreening
from spheroid_node.node.signals import Stopping
from spheroid_node.node.state import StateDirectory
from spheroid_node.node.submitting import Submitter
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.trainer import TrainerProcess
from spheroid_node.node.versions import VersionStore
from spheroid_node.node.worker import Worker
from spheroid_node.run import RunSpec
from spheroid_node.serving.hop import HopService
from spheroid_node.serving.sessions import Limits
from spheroid_node.training.trainer_protocol import Configure
from spheroid_node.wire.messages import HopAddress

log = structlog.get_logger()

FINISH_SECONDS = 3.0
"""After the first Ctrl-C, for rounds that this node leads and whose deadline is so near."""
LEAVE_SECONDS = 6.0
"""After that, for leaving; what has not ended by then is dropped."""
GOODBYE_SECONDS = 2.0
END_SECONDS = 9.5
"""After the first Ctrl-C, whatever is still to be done: users are told that it takes ten seconds."""
POLL_SECONDS = 1.0
DISK_SECONDS = 10.0
"""Between tries to write what a full disk did not take."""
MAX_CONNECTIONS = 1024
MAX_PER_PEER = 160
"""A session takes a connection of its client and one of the hop before, and both may have many sessions."""


async def run_node(config: NodeConfig, block: int | None) -> None:
    """Own a replica of ``block`` (None: the one that needs it most) until a signal ends it.

    Raises the errors of errors.py that a user can meet at the start, before anything is announced.
    """
    raise_file_limit(2 * MAX_CONNECTIONS)
    torch.set_num_threads(1)  # for serving; the trainer has a process and threads of its own
    async with Stopping(END_SECONDS) as stopping:
        with StateDirectory(config.state_dir) as state:
            await _live(config, block, state, stopping)
    log.info("node.stopped")


async def _live(config: NodeConfig, block: int | None, state: StateDirectory, stopping: Stopping) -> None:
    identity = load_identity(state.identity)
    async with open_client(config, identity, client_mode=False, contacts=state.contacts) as client:
        state.check(client.run)
        if not client.run.allows(identity.peer):
            raise NotAllowed(client.run.run_id, identity.peer)
        placing: Placing | None = None
        if block is None:
            able = await asyncio.to_thread(blocks_that_fit, client.run, config.device, config.precision)
            block, placing = await choose_block(client, able), Placing(client, able)
        client.run.check_block(block)
        next_block: int | None = block
        while next_block is not None:
            next_block = await _own(config, client, state, next_block, placing, stopping)


async def _own(
    config: NodeConfig,
    client: Client,
    state: StateDirectory,
    block: int,
    placing: Placing | None,
    stopping: Stopping,
) -> int | None:
    """Own a replica of ``block`` until a signal; returns the block that ``placing`` would rather have."""
    trainer = TrainerProcess(_configuration(config, client.run, state, block, client.identity.peer))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(trainer.stop)
        await trainer.start()
        state.bind(client.run)
        return await Node(config, client, state, block, trainer, placing).run(stopping)


@dataclass
class Node:
    """The parts of a node, wired together for one block."""

    config: NodeConfig
    client: Client
    state: StateDirectory
    block: int
    trainer: TrainerProcess
    placing: Placing | None = None
    """Where the choice of the block is the node's."""

    def __post_init__(self) -> None:
        client, run = self.client, self.client.run
        own = set(run.worker_groups(self.block))
        self.store = VersionStore(run, lambda group: self.state.versions(group) if group in own else None)
        self.state.forget_partials(own)
        self.report = Report(self.block, self.trainer.device)
        self.sync = Synchroniser(
            client, self.store, lambda group: self.state.partial(group) if group in own else None
        )
        groups = run.worker_groups(self.block)
        screening = TrainerScreening(self.trainer, run.round.screen_windows)
        self.collector = Collector(client, self.store, self.sync, groups, self.state.spool, screening)
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="hop")
        self.hops = HopService(
            run,
            self.block,
            HopModels(run, self.block, self.store),
            self._dial_hop,
            self.executor,
            Limits(cache_bytes=self.config.cache_mb * 1_000_000),
        )
        self.server = LinkServer(
            client.identity,
            run,
            self.config.host,
            self.config.data_port,
            {"round": self.collector.handle, "transfer": self._transfer, "hop": self.hops.handle},
            client.traffic,
            streams=client.streams,
            max_connections=MAX_CONNECTIONS,
            max_per_peer=MAX_PER_PEER,
            rates=Rates.for_versions(held_bytes(run), run.round.period),
        )
        submitter = Submitter(client, self.collector, self.sync)
        outbox = Outbox(run, self.state.outbox, self.store.disk)
        self.worker = Worker(
            client, self.block, self.store, self.sync, submitter, self.trainer, self.report, outbox
        )

    async def run(self, stopping: Stopping) -> int | None:
        """Serve and train until ``stopping`` is set, then leave.

        Or until another block has more need of this machine; returns that block.
        """
        await self.server.start()
        address = announced_address(self.config, self.client.identity.peer, self.server.port)
        reporter = Reporter(self.client, self.store, self.report, address)
        try:
            await asyncio.gather(*map(self.sync.sync, self.client.run.worker_groups(self.block)))
            await asyncio.gather(*map(self.sync.whole, self.client.run.worker_wholes(self.block)))
            stopping.started()
            self.report.state = "online"
            self._log_started(address)
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(work, name=name)
                    for name, work in {
                        "dht": self.client.dht.watch(),
                        "report": reporter.run(),
                        "meters": self._meters(reporter),
                        "disk": self._write_again(),
                        "neighbours": Neighbours(self.client, self.report).run(),
                        "sync": self.sync.keep_up(self.client.run.worker_wholes(self.block)),
                        "collector": self.collector.run(),
                        "worker": self.worker.run(),
                    }.items()
                ]
                next_block = await self._until_it_ends(stopping)
                await self._finish(reporter)
                for task in running:
                    task.cancel()
        finally:
            await self._leave(reporter)
        return next_block

    async def _until_it_ends(self, stopping: Stopping) -> int | None:
        if self.placing is None:
            await stopping.wait()
            return None
        stopped, moved = asyncio.create_task(stopping.wait()), asyncio.create_task(self.placing.run())
        try:
            await asyncio.wait((stopped, moved), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return None
            log.info("node.moving", block=self.block, to=moved.result())
            return moved.result()
        finally:
            stopped.cancel()
            moved.cancel()

    async def _finish(self, reporter: Reporter) -> None:
        """Whoever counts on this node in an open round gets its version, or is sent to the next in rank."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS + 0.5):
                parts = (_goodbye(reporter), self.collector.leave(FINISH_SECONDS))
                await asyncio.gather(*parts, return_exceptions=True)

    async def _leave(self, reporter: Reporter) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                parts = [self.hops.stop(), self.trainer.stop()]
                if self.report.state != "leaving":
                    parts.append(_goodbye(reporter))
                await asyncio.gather(*parts, return_exceptions=True)
                await self.server.stop()
        self.executor.shutdown(wait=False, cancel_futures=True)

    async def _meters(self, reporter: Reporter) -> None:
        """Copy into the report what the services count, how this machine is, and where."""
        while True:
            counted = (self.hops.sessions, self.hops.hop_seconds, self.collector.led)
            if counted != (self.report.sessions, self.report.hop_seconds, self.report.led):
                self.report.sessions, self.report.hop_seconds, self.report.led = counted
                self.report.touch()
            self.report.of_machine(
                clock=dht_clock.note, disk=self.store.disk.note, network=self.client.dht.note
            )
            reporter.move_to(
                announced_address(
                    self.config, self.client.identity.peer, self.server.port, reporter.address.host
                )
            )
            await asyncio.sleep(POLL_SECONDS)

    async def _write_again(self) -> None:
        """What a full disk did not take, for ever."""
        while True:
            await asyncio.sleep(DISK_SECONDS)
            if self.store.unwritten:
                await asyncio.to_thread(self.store.write_again)

    async def _transfer(self, link: Link) -> None:
        await serve_transfer(link, self.store)

    async def _dial_hop(self, address: HopAddress) -> Link:
        return await self.client.dial(address, "hop")

    def _log_started(self, address: HopAddress) -> None:
        log.info(
            "node.started",
            peer=address.peer,
            run=self.client.run.run_id,
            block=self.block,
            device=self.report.device,
            port=self.client.dht.listening.port,
            data_port=self.server.port,
            address=self.client.dht.local_address,
            versions={
                group: self.store.newest(group).version for group in self.client.run.worker_groups(self.block)
            },
        )


async def _goodbye(reporter: Reporter) -> None:
    """A DHT that does not answer must not hold up the rest."""
    async with asyncio.timeout(GOODBYE_SECONDS):
        await reporter.leave()


def announced_address(config: NodeConfig, peer: str, listening: int, last: str = LOOPBACK) -> HopAddress:
    """Where others should dial this machine's services, which listen on the port ``listening``."""
    port = listening if config.announce_data_port is None else config.announce_data_port
    return HopAddress(peer=peer, host=announced_host(config, last), port=port)


def announced_host(config: NodeConfig, last: str = LOOPBACK) -> str:
    """The address under which others should dial this machine's services; ``last`` while it has none."""
    if config.announce is not None:
        return config.announce
    if config.host not in ("0.0.0.0", "::"):
        return config.host
    return outgoing_address() or last


def held_bytes(run: RunSpec) -> int:
    """The most that a node can hold of the versions of all groups."""
    return 4 * run.kept_versions * sum(elements(run, group) for group in run.groups)


def _configuration(
    config: NodeConfig, run: RunSpec, state: StateDirectory, block: int, peer: str
) -> Configure:
    threads = config.threads or int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return Configure(
        run=run.pack(),
        block=block,
        device=config.device,
        precision=config.precision,
        compiled=config.compile,
        data=list(config.data),
        held_out=list(config.held_out),
        # Each worker draws windows of its own: replicas that saw the same text would learn the same.
        worker_seed=int.from_bytes(peer.encode()[-6:], "big"),
        threads=threads,
        state=str(state.optimiser(block)),
    )


def raise_file_limit(wanted: int) -> None:
    """Open files that this process may have, as far as the system lets it: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
