"""A swarm of real processes to be hurt: a proxy before every worker, two bootstraps, every log followed.

What it looks like when nobody hurts it is measured once: how many processes, which ports they listen on, how
many descriptors they have open. A process is whole when it looks like that again.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.local_swarm import Journal, LocalSwarm
from benchmarks.wan import Wan
from benchmarks.wrong_clock import wrong_clock
from spheroid_node.cli.demo.processes import Child, Children
from spheroid_node.config import LOOPBACK
from spheroid_node.errors import PortInUse
from spheroid_node.net.ports import free_port
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import DataSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.training.trainer_protocol import MODULE

WORKERS, BLOCKS, BOOTSTRAPS = 6, 2, 2
DISK_BYTES = 32 * 2**20
"""Of the small disk that one worker's state directory is on."""
PATIENCE = 240.0
ORPHAN_SECONDS = 20.0
SPARE_DESCRIPTORS = 48
"""Open files beyond those of calm days that are no leak: connections under way, and those others keep."""
CALM_SAMPLES = 8
POLL_SECONDS = 0.25


def small_run(name: str, seed: int, data: str = "wikitext-2") -> RunSpec:
    """So small, and with so few steps a round, that six workers leave two cores time for restarts."""
    return RunSpec(
        name=name,
        seed=seed,
        model=ModelSpec(blocks=BLOCKS, layers=1, width=32, heads=2, window=32),
        training=TrainingSpec(local_steps=60, batch=4),
        round=RoundSpec(genesis=float(int(time.time())), period=8.0, settle=2.5),
        data=DataSpec(name=data),
    )


def quiet_port(option: str) -> int:
    """A free port that no outgoing connection is given, so that a node finds it free whenever it starts."""
    while True:
        with suppress(PortInUse):
            return free_port(LOOPBACK, 20_000 + secrets.randbelow(12_000), option)


@dataclass(frozen=True)
class Normal:
    """A node and what it started, on a calm day."""

    processes: int
    ports: frozenset[int]
    descriptors: int


class NotInTime(Exception):
    """What was waited for did not come."""


class FaultySwarm:
    """Workers and bootstraps by name; who is being hurt, and since when the others have had their peace."""

    def __init__(self, swarm: LocalSwarm, text: Sequence[str]) -> None:
        self.swarm, self.run, self.folder = swarm, swarm.run, swarm.folder
        self.slots = Slots.of(swarm.run.round)
        self.links: dict[str, Wan] = {}
        self.children: dict[str, Child] = {}
        self.journals: dict[str, Journal] = {}
        self.normal: dict[str, Normal] = {}
        self.bootstraps: dict[str, str] = {}
        """Their addresses."""
        self.busy: set[str] = set()
        self.calm_since: dict[str, float] = {}
        self.on_event: list[Callable[[str, dict[str, Any]], None]] = []
        self.small_disks: set[str] = set()
        self._text = tuple(text)
        self._ports: dict[str, tuple[str, ...]] = {}

    # --- who is there ---

    @property
    def workers(self) -> list[str]:
        return list(self.links)

    def block(self, name: str) -> int:
        return int(name.rpartition("-")[2]) % BLOCKS

    def groups(self, name: str) -> tuple[str, ...]:
        return self.run.worker_groups(self.block(name))

    def started(self, name: str) -> dict[str, Any] | None:
        """What a worker last said at its start."""
        return next(iter(self.journals[name].since(0.0, "node.started")), None)

    def aggregator(self, group: str, round: int) -> str:
        """The worker whom all ask first."""
        peers = {
            str(started["peer"]): name
            for name in self.workers
            if group in self.groups(name) and (started := self.started(name)) is not None
        }
        return peers[ranking(self.run.run_id, group, round, peers)[0]]

    def tree(self, name: str) -> list[psutil.Process]:
        """The process of that name and what it started; none once it has ended."""
        with suppress(psutil.Error):
            process = psutil.Process(self.children[name].process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def trainer(self, name: str) -> psutil.Process | None:
        return next((process for process in self.tree(name) if MODULE in _command(process)), None)

    def daemon(self, name: str) -> psutil.Process | None:
        """Its libp2p daemon."""
        return next((process for process in self.tree(name) if _is_p2pd(process)), None)

    # --- starting and ending ---

    def start_worker(self, name: str, clock: float = 0.0) -> None:
        """``clock``: seconds by which its clock is wrong."""
        more = [word for address in list(self.bootstraps.values())[1:] for word in ("--peer", address)]
        with wrong_clock(self.folder / f"{name}.clock", clock) if clock else nullcontext():
            arguments = (*self._text, *self._ports[name], *more)
            self.children[name] = self.swarm.join(self.block(name), name, arguments)

    def start(self, name: str) -> None:
        """Start a worker again, or a bootstrap: by another one, if one is alive."""
        if name not in self.bootstraps:
            self.start_worker(name)
            return
        others = [other for other in self.bootstraps if other != name and self.is_alive(other)]
        peers = [word for other in others for word in ("--peer", self.bootstraps[other])]
        self.children[name] = self.swarm.launch_bootstrap(name, *peers)

    def is_alive(self, name: str) -> bool:
        return self.children[name].process.poll() is None

    async def kill(self, name: str) -> None:
        """SIGKILL. Raises :class:`NotInTime` where something that it had started outlives it."""
        tree = self.tree(name)
        self.children[name].process.kill()
        self.children[name].process.wait()
        await self.until("the end of its children", lambda: not any(map(_lives, tree)), ORPHAN_SECONDS)

    async def begin(self, small_disk: bool) -> None:
        """Start everybody, wait until all take part, and see what is normal."""
        for number in range(WORKERS):
            name = f"worker-{number}"
            port, data_port = (quiet_port(option) for option in ("--port", "--data-port"))
            self.links[name] = wan = Wan(seed=number)
            announced = await wan.forward(LOOPBACK, data_port)
            self._ports[name] = (
                f"--port={port}", f"--data-port={data_port}", f"--announce-data-port={announced}"
            )  # fmt: skip
            self.journals[name] = Journal(self.folder / f"{name}.log")
            if small_disk and number == WORKERS - 1 and mount_small(self.folder / name):
                self.small_disks.add(name)
            self.start_worker(name)
        for name in self.workers:
            await self.until(f"the first update of {name}", partial(self.takes_part, name, 0.0))
        await self._see_what_is_normal()

    async def _see_what_is_normal(self) -> None:
        for _ in range(CALM_SAMPLES):
            await asyncio.sleep(self.run.round.period / CALM_SAMPLES)
            for name in self.children:
                tree = self.tree(name)
                most = max(_descriptors(tree), getattr(self.normal.get(name), "descriptors", 0))
                self.normal[name] = Normal(len(tree), _ports(tree), most)
        self.calm_since = dict.fromkeys(self.children, time.time())

    # --- how they are ---

    def is_whole(self, name: str) -> bool:
        """Whether processes, ports and descriptors are those of calm days."""
        tree, normal = self.tree(name), self.normal[name]
        return (
            len(tree) == normal.processes
            and _ports(tree) == normal.ports
            and _descriptors(tree) <= normal.descriptors + SPARE_DESCRIPTORS
        )

    def looks_like(self, name: str) -> str:
        """For a person: what it is now, and what it should be."""
        tree = self.tree(name)
        now = Normal(len(tree), _ports(tree), _descriptors(tree))
        return f"{now}, normally {self.normal.get(name)}; it last said: {self.children[name].last_line[:300]}"

    def takes_part(self, name: str, since: float) -> bool:
        return bool(self.journals[name].since(since, "round.receipt", verdict="accepted"))

    def is_well(self, name: str, since: float) -> bool:
        """Whether it is whole, and does its work again since then."""
        if name in self.bootstraps:
            return self.is_whole(name)
        return self.takes_part(name, since) and self.is_whole(name)

    # --- time ---

    async def until(self, what: str, probe: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Raises :class:`NotInTime`."""
        deadline = time.monotonic() + seconds
        while not probe():
            if time.monotonic() >= deadline:
                raise NotInTime(f"waited {seconds:.0f} s in vain for {what}")
            await asyncio.sleep(POLL_SECONDS)

    async def follow_logs(self) -> None:
        """For ever."""
        while True:
            for name, journal in self.journals.items():
                for event in journal.read_on():
                    for listener in self.on_event:
                        listener(name, event)
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def faulty_swarm(
    folder: Path,
    run: RunSpec,
    text: Sequence[str],
    *,
    small_disk: bool = False,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
) -> AsyncIterator[FaultySwarm]:
    """Six workers that take part, and two bootstraps, in ``folder``. All have left when this ends."""
    async with AsyncExitStack() as stack:
        stack.callback(_unmount, folder)
        children = stack.enter_context(Children(folder))
        stack.push_async_callback(children.stop)
        hurt = FaultySwarm(LocalSwarm(folder, run, children), text)
        hurt.on_event += [] if on_event is None else [on_event]
        hurt.bootstraps["bootstrap"], hurt.children["bootstrap"] = hurt.swarm.address, hurt.swarm.bootstrap
        second = hurt.swarm.start_bootstrap("bootstrap-1", "--peer", hurt.swarm.address)
        hurt.bootstraps["bootstrap-1"], hurt.children["bootstrap-1"] = second, hurt.swarm.bootstrap
        hurt.journals |= {name: Journal(folder / f"{name}.log") for name in hurt.bootstraps}
        following = asyncio.create_task(hurt.follow_logs())
        stack.callback(following.cancel)
        try:
            await hurt.begin(small_disk)
            yield hurt
        finally:
            for wan in hurt.links.values():
                await wan.__aexit__(None, None, None)


# --- a small disk ---------------------------------------------------------------------------------


def mount_small(folder: Path) -> bool:
    """Mount a small disk at ``folder``; False where this user may not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(folder: Path) -> None:
    for mounted in folder.iterdir():
        if mounted.is_mount():
            subprocess.run(["umount", "-l", str(mounted)], capture_output=True)


# --- what the system says of processes ------------------------------------------------------------


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _is_p2pd(process: psutil.Process) -> bool:
    return any(Path(word).name == "p2pd" for word in _command(process)[:1])


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _descriptors(tree: Sequence[psutil.Process]) -> int:
    total = 0
    for process in tree:
        with suppress(psutil.Error):
            total += process.num_fds()
    return total


def _ports(tree: Sequence[psutil.Process]) -> frozenset[int]:
    """That they listen on."""
    ports = set()
    for process in tree:
        with suppress(psutil.Error):
            ports |= {
                connection.laddr.port
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return frozenset(ports)


def random_of(seed: int, *names: object) -> random.Random:
    """Independent of all others, and the same in every run."""
    return random.Random(" ".join(map(str, (seed, *names))))
