"""Faults for a :mod:`benchmarks.faulty_swarm`: a schedule from a seed, and each fault inflicted and healed.

Who is hurt is drawn when its turn comes, from the seed and the fault's number, among those who have their
peace. A fault counts as healed once its victim is whole and does its work again: a worker when an update of
it was accepted after the cause had gone, and its processes, ports and descriptors are those of calm days.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.faulty_swarm import BLOCKS, PATIENCE, FaultySwarm, NotInTime, random_of

AT_ONCE = 4
"""Faults at a time."""
MOST_OF_A_BLOCK = 2
"""Replicas of a block that are hurt at a time, of three: what nobody holds any more would begin anew."""
CLOCK_WRONG = 600.0
HOSTILE_SECONDS = 25.0
DISK_MARGIN = 4096

NETWORK_TROUBLE = 3
"""Exit code of a node that found nobody at its start; whoever runs one starts it again."""

Role = Literal["worker", "aggregator", "bootstrap", "bootstraps", "anybody", "small-disk", "nobody"]
Inflict = Callable[[FaultySwarm, str, random.Random], Awaitable[str]]
"""Hurts the one of that name and returns once the cause has gone, with a word on what was seen."""


@dataclass(frozen=True)
class Kind:
    role: Role
    inflict: Inflict


@dataclass
class Fault:
    """One fault, and what came of it. Times are seconds since the schedule began."""

    number: int
    kind: str
    victim: str
    at: float
    lasted_s: float = 0.0
    """How long its cause lasted."""
    healed_s: float | None = None
    """From the end of its cause until the victim was well; None: it never was."""
    note: str = ""


# --- processes ------------------------------------------------------------------------------------


async def kill(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    await hurt.kill(name)
    await asyncio.sleep(rng.uniform(0.0, 4.0))
    hurt.start(name)
    return ""


async def kill_all_bootstraps(hurt: FaultySwarm, _name: str, rng: random.Random) -> str:
    for name in hurt.bootstraps:
        await hurt.kill(name)
    await asyncio.sleep(rng.uniform(0.0, 4.0))
    for name in hurt.bootstraps:
        hurt.start(name)
        await hurt.until("the first bootstrap", partial(hurt.is_whole, name))
    return ""


async def stop(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    """Only the node, or as a machine that sleeps: all that it has started, too."""
    asleep = rng.random() < 0.5
    await _stopped(hurt.tree(name) if asleep else hurt.tree(name)[:1], rng.uniform(1.0, 15.0))
    return "with all that it started" if asleep else ""


async def kill_p2pd(hurt: FaultySwarm, name: str, _rng: random.Random) -> str:
    return await _kill_part(hurt, name, hurt.daemon(name))


async def kill_trainer(hurt: FaultySwarm, name: str, _rng: random.Random) -> str:
    return await _kill_part(hurt, name, hurt.trainer(name))


async def stop_trainer(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    await _stopped([part] if (part := hurt.trainer(name)) else [], rng.uniform(1.0, 15.0))
    return ""


async def stop_p2pd(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    await _stopped([part] if (part := hurt.daemon(name)) else [], rng.uniform(1.0, 15.0))
    return ""


async def _kill_part(hurt: FaultySwarm, name: str, part: psutil.Process | None) -> str:
    if part is None:
        return "it was not there"
    with suppress(psutil.NoSuchProcess):
        part.kill()
    await hurt.until(f"the end of a part of {name}", lambda: not part.is_running())
    return ""


async def _stopped(processes: Sequence[psutil.Process], seconds: float) -> None:
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


# --- links ----------------------------------------------------------------------------------------


async def cut(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    hurt.links[name].cut()
    return await _mended(hurt, name, rng)


async def stall(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    hurt.links[name].stall()
    return await _mended(hurt, name, rng)


async def delay(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    hurt.links[name].delay = seconds = rng.uniform(0.2, 1.5)
    return await _mended(hurt, name, rng) or f"{seconds:.1f} s each way"


async def truncate(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    hurt.links[name].damage(truncate=rng.choice((0.1, 0.5)))
    return await _mended(hurt, name, rng)


async def corrupt(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    hurt.links[name].damage(corrupt=rng.choice((0.1, 0.5)))
    return await _mended(hurt, name, rng)


async def _mended(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    link = hurt.links[name]
    try:
        await asyncio.sleep(rng.uniform(4.0, 20.0))
    finally:
        link.delay = 0.0
        link.heal()
    return ""


# --- a disk, a clock, a stranger ------------------------------------------------------------------


async def fill_disk(hurt: FaultySwarm, name: str, _rng: random.Random) -> str:
    """Until the node has reported it; it must go on."""
    ballast, began = hurt.folder / name / "ballast", time.time()
    try:
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            for size in (2**20, DISK_MARGIN, 1):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

        def reported() -> bool:
            return bool(hurt.journals[name].since(began, "disk.not_written"))

        await hurt.until("a report of the full disk", reported)
    finally:
        ballast.unlink()
    return "reported"


async def wrong_clock(hurt: FaultySwarm, name: str, rng: random.Random) -> str:
    """Ten minutes ahead or behind: the node says so, and takes part all the same."""
    offset, began = rng.choice((CLOCK_WRONG, -CLOCK_WRONG)), time.time()
    await hurt.kill(name)
    hurt.start_worker(name, clock=offset)

    def takes_part() -> bool:
        if hurt.children[name].process.poll() == NETWORK_TROUBLE:  # all bootstraps may be away
            hurt.start_worker(name, clock=offset)
        return bool(hurt.journals[name].since(began, "clock.off")) and hurt.takes_part(name, began)

    await hurt.until(f"an update of a node whose clock is wrong by {offset:+.0f} s", takes_part)
    await hurt.kill(name)
    hurt.start(name)
    return f"{offset:+.0f} s"


async def hostile_peer(hurt: FaultySwarm, _name: str, rng: random.Random) -> str:
    words = [word for address in hurt.bootstraps.values() for word in ("--peer", address)]
    words += ["--run", hurt.run.run_id]
    words += ["--block", str(rng.randrange(BLOCKS)), "--seed", str(rng.randrange(2**31))]
    words += ["--seconds", str(HOSTILE_SECONDS)]
    try:
        async with asyncio.timeout(PATIENCE):
            code = NETWORK_TROUBLE
            while code == NETWORK_TROUBLE:
                code = await _hostile(hurt.folder / "hostile.log", words)
    except TimeoutError:
        raise NotInTime("the hostile peer did not end") from None
    if code:
        raise NotInTime(f"the hostile peer ended with {code}: see hostile.log")
    return ""


async def _hostile(log: Path, words: Sequence[str]) -> int:
    """Its exit code."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.hostile_peer", *words, stdout=output, stderr=output
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


KINDS: dict[str, Kind] = {
    "worker killed": Kind("worker", kill),
    "worker stopped": Kind("worker", stop),
    "aggregator killed": Kind("aggregator", kill),
    "aggregator stopped": Kind("aggregator", stop),
    "aggregator cut off": Kind("aggregator", cut),
    "bootstrap killed": Kind("bootstrap", kill),
    "bootstrap stopped": Kind("bootstrap", stop),
    "all bootstraps killed": Kind("bootstraps", kill_all_bootstraps),
    "p2pd killed": Kind("anybody", kill_p2pd),
    "p2pd stopped": Kind("worker", stop_p2pd),
    "trainer killed": Kind("worker", kill_trainer),
    "trainer stopped": Kind("worker", stop_trainer),
    "link cut": Kind("worker", cut),
    "link stalled": Kind("worker", stall),
    "link delayed": Kind("worker", delay),
    "link truncating": Kind("worker", truncate),
    "link corrupting": Kind("worker", corrupt),
    "disk full": Kind("small-disk", fill_disk),
    "clock wrong": Kind("worker", wrong_clock),
    "hostile peer": Kind("nobody", hostile_peer),
}
KILLS_AND_STOPS = tuple(name for name in KINDS if name.endswith((" killed", " stopped")))


# --- a schedule -----------------------------------------------------------------------------------


def schedule(seed: int, kinds: Sequence[str], faults: int, seconds: float) -> list[tuple[float, str]]:
    """When, and of which kind: evenly spread but for some jitter, all kinds equally often."""
    rng, drawn = random_of(seed, "schedule"), list[str]()
    while len(drawn) < faults:
        drawn += rng.sample(kinds, len(kinds))
    step = seconds / faults
    return [((number + 0.8 * rng.random()) * step, drawn[number]) for number in range(faults)]


class Storm:
    """Plays a schedule. :attr:`faults` have begun; ``unhealed`` hears of each that never heals."""

    def __init__(self, hurt: FaultySwarm, seed: int, unhealed: Callable[[Fault], None]) -> None:
        self._hurt, self._seed, self._unhealed = hurt, seed, unhealed
        self.faults: list[Fault] = []
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._began = time.time()

    async def play(self, planned: Sequence[tuple[float, str]]) -> list[Fault]:
        """All of it, to the end of the last fault."""
        self._began = time.time()
        async with asyncio.TaskGroup() as tasks:
            for number, (at, kind) in enumerate(planned):
                await asyncio.sleep(max(0.0, self._began + at - time.time()))
                await self._slots.acquire()
                tasks.create_task(self._one(number, kind))
        return self.faults

    async def _one(self, number: int, name: str) -> None:
        hurt, kind, rng = self._hurt, KINDS[name], random_of(self._seed, number)
        victims: list[str] = []
        try:
            victims, moment = await self._victims(kind, rng)
            hurt.busy |= set(victims)
            await asyncio.sleep(max(0.0, moment - time.time()))
            fault = Fault(number, name, " and ".join(victims), round(time.time() - self._began, 1))
            self.faults.append(fault)
            await self._suffer(fault, kind, victims, rng)
        finally:
            hurt.busy -= set(victims)
            hurt.calm_since |= dict.fromkeys(victims, time.time())
            self._slots.release()

    async def _suffer(self, fault: Fault, kind: Kind, victims: list[str], rng: random.Random) -> None:
        hurt, began = self._hurt, time.time()
        try:
            fault.note = await kind.inflict(hurt, victims[0] if victims else "", rng)
            gone = time.time()
            fault.lasted_s = round(gone - began, 1)
            for victim in victims:
                await hurt.until(f"{victim} to be well", partial(self._is_well, victim, gone))
            fault.healed_s = round(time.time() - gone, 1)
        except NotInTime as error:
            seen = "; ".join(f"{victim}: {hurt.looks_like(victim)}" for victim in victims)
            fault.note = f"{error}. {seen}"
            self._unhealed(fault)
            for victim in victims:
                if not hurt.is_alive(victim):  # the rest must not suffer from its absence
                    hurt.start(victim)
        healed = "never" if fault.healed_s is None else f"in {fault.healed_s} s"
        print(
            f"{fault.at:7.1f} s  {fault.kind}: {fault.victim or 'the swarm'}, healed {healed}  {fault.note}",
            flush=True,
        )

    def _is_well(self, victim: str, since: float) -> bool:
        hurt = self._hurt
        if not hurt.is_alive(victim):
            if hurt.children[victim].process.returncode != NETWORK_TROUBLE:
                raise NotInTime(f"{victim} ended by itself")
            hurt.start(victim)
        return hurt.is_well(victim, since)

    async def _victims(self, kind: Kind, rng: random.Random) -> tuple[list[str], float]:
        """Who, and at which moment; waits until they may be hurt."""
        hurt = self._hurt
        if kind.role == "nobody":
            return [], 0.0
        while True:
            able, moment = self._able(kind.role, rng)
            if kind.role == "bootstraps":
                if not hurt.busy & set(able):
                    return able, moment
            elif free := [name for name in able if self._may_be_hurt(name)]:
                return [rng.choice(free)], moment
            await asyncio.sleep(1.0)

    def _able(self, role: Role, rng: random.Random) -> tuple[list[str], float]:
        hurt = self._hurt
        if role == "aggregator":
            slots, round = hurt.slots, hurt.slots.round_at(time.time()) + 1
            moment = slots.start(round) + rng.uniform(0.0, slots.period)
            return [hurt.aggregator(rng.choice(hurt.run.groups), round)], moment
        bootstraps = list(hurt.bootstraps)
        able = {"bootstrap": bootstraps, "bootstraps": bootstraps, "anybody": list(hurt.children)}
        return able.get(role, sorted(hurt.small_disks) if role == "small-disk" else hurt.workers), 0.0

    def _may_be_hurt(self, name: str) -> bool:
        hurt = self._hurt
        if name in hurt.busy or name in hurt.bootstraps:
            return name not in hurt.busy
        beside = [other for other in hurt.busy & set(hurt.links) if hurt.block(other) == hurt.block(name)]
        return len(beside) < MOST_OF_A_BLOCK


def by_kind(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """A row for every kind: how many, how many never healed, and how long it took the others."""
    rows = []
    for name in KINDS:
        of_kind = [fault for fault in faults if fault.kind == name]
        healed = [fault.healed_s for fault in of_kind if fault.healed_s is not None]
        if of_kind:
            rows.append(
                {
                    "kind": name,
                    "count": len(of_kind),
                    "unhealed": len(of_kind) - len(healed),
                    "healed_median_s": round(statistics.median(healed), 1) if healed else None,
                    "healed_worst_s": max(healed, default=None),
                }
            )
    return rows


def possible(hurt: FaultySwarm, kinds: Sequence[str]) -> list[str]:
    """Those of ``kinds`` that can be had here: not every user may mount a small disk."""
    return [name for name in kinds if KINDS[name].role != "small-disk" or hurt.small_disks]


def environment(folder: str) -> None:
    """For all processes of a storm: one thread each, and none of what the user has set for theirs."""
    os.environ |= {"OMP_NUM_THREADS": "1", "SPHEROID_RUNTIME_DIR": f"{folder}/runtime"}
