"""A swarm of real processes through a storm of faults, and what must hold all the same.

    python -m benchmarks.chaos --data DATA --seed 0 --minutes 60 --faults 300

Two swarms, each of six workers of two blocks and two bootstraps, run at the same time, so that both meet the
same machine: one undisturbed, one while a schedule of faults drawn from the seed (:mod:`benchmarks.faults`)
is played. All the while the invariants of :mod:`benchmarks.invariants` are watched in both; beside them: a
process that nobody hurts ends (``ended``), a fault does not heal in time (``unhealed``), nodes do not agree
in the end within PATIENCE seconds (``disagreed``), or a process, port or open file too many is left
(``left over``). ``ce_delta`` is by how much the from-noise cross-entropy at the end is above that of the
undisturbed run, nats a byte. The short form is tests/chaos. Ten minutes come on top, to start, to heal and to
be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from benchmarks.arms import RAW, unpack
from benchmarks.faults import KINDS, Fault, Storm, by_kind, environment, possible, schedule
from benchmarks.faulty_swarm import (
    ORPHAN_SECONDS,
    PATIENCE,
    FaultySwarm,
    NotInTime,
    faulty_swarm,
    small_run,
)
from benchmarks.invariants import Invariants, Violation, address_of
from benchmarks.report import write_result
from spheroid_node.config import LOOPBACK
from spheroid_node.run import RunSpec
from spheroid_node.wire.messages import HopAddress

LOOK_SECONDS = 1.5
ASK_SECONDS = 10.0
EVALUATION_SECONDS = 900.0


@dataclass
class Outcome:
    """What came of one run."""

    faults: list[Fault] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """What the watch has looked at."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """As ``spheroid-node eval --json`` prints it."""
    kinds: list[str] = field(default_factory=list)
    """Of faults that could be had."""

    @property
    def ce(self) -> float:
        return float(self.evaluation["ce"])

    def summary(self) -> str:
        """For a person: a line for each violation, and one of what was seen."""
        broken = [f"{item.rule}: {item.node} {item.where}: {item.detail}" for item in self.violations]
        return "\n".join([*broken, f"CE {self.ce:.4f}, {len(self.faults)} faults, {self.counts}"])


async def play(
    folder: Path,
    run: RunSpec,
    text: Sequence[str],
    *,
    seed: int,
    seconds: float,
    faults: int,
    kinds: Sequence[str] = tuple(KINDS),
    windows: int = 512,
) -> Outcome:
    """A run of ``seconds`` in the new ``folder``, beside the time to start and to heal."""
    folder.mkdir(parents=True)  # noqa: ASYNC240
    invariants, outcome = Invariants(run, folder), Outcome()
    async with faulty_swarm(folder, run, text, small_disk=True, on_event=invariants.observe) as hurt:
        outcome.kinds = possible(hurt, kinds)
        watching = asyncio.create_task(_watch(hurt, invariants))
        try:
            end = time.time() + seconds
            if faults:
                storm = Storm(hurt, seed, lambda fault: _unhealed(invariants, fault))
                outcome.faults = await storm.play(schedule(seed, outcome.kinds, faults, seconds))
            await asyncio.sleep(max(0.0, end - time.time()))
            await _come_to_rest(hurt, invariants)
            outcome.evaluation = await asyncio.to_thread(_evaluate, hurt, text, windows)
        finally:
            watching.cancel()
        if watching.done() and not watching.cancelled():
            watching.result()  # a watch that died has seen nothing
        everybody = [process for name in hurt.children for process in hurt.tree(name)]
        ports = [port for normal in hurt.normal.values() for port in normal.ports]
    _look_at_what_is_left(invariants, everybody, ports)
    invariants.finish()
    outcome.violations, outcome.counts = invariants.violations, dict(invariants.counts)
    return outcome


async def _watch(hurt: FaultySwarm, invariants: Invariants) -> None:
    """For ever."""
    asked = 0.0
    while True:
        calm = {name: math.inf if name in hurt.busy else since for name, since in hurt.calm_since.items()}
        invariants.look({name: calm[name] for name in hurt.workers})
        for name in calm:
            if name not in hurt.busy and not hurt.is_alive(name):
                process = hurt.children[name].process
                detail = f"exit code {process.returncode}; {hurt.looks_like(name)}"
                invariants.broken("ended", name, str(process.pid), detail)
                hurt.start(name)
        if time.time() - asked > ASK_SECONDS:
            asked = time.time()
            await invariants.ask(_addresses(hurt))
        await asyncio.sleep(LOOK_SECONDS)


def _addresses(hurt: FaultySwarm) -> dict[str, HopAddress]:
    return {name: address_of(started) for name in hurt.workers if (started := hurt.started(name))}


def _unhealed(invariants: Invariants, fault: Fault) -> None:
    invariants.broken("unhealed", fault.victim, f"{fault.kind} {fault.number}", fault.note)


async def _come_to_rest(hurt: FaultySwarm, invariants: Invariants) -> None:
    """Nobody is hurt any more: all must be whole, and follow and hand out the same."""
    began = time.time()
    for name in hurt.children:
        try:
            await hurt.until(f"{name} to be well", partial(hurt.is_well, name, began))
        except NotInTime:
            invariants.broken("left over", name, "processes, ports, files", hurt.looks_like(name))
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        answers = await invariants.ask(_addresses(hurt)) if invariants.agree() else {}
        given = {
            group: {answers.get((name, group)) for name in names} for group, names in _owners(hurt).items()
        }
        if answers and all(len(words) == 1 and None not in words for words in given.values()):
            return
        await asyncio.sleep(LOOK_SECONDS)
    invariants.broken("disagreed", "", "at the end", json.dumps(invariants.newest()))


def _owners(hurt: FaultySwarm) -> dict[str, list[str]]:
    return {group: [name for name in hurt.workers if group in hurt.groups(name)] for group in hurt.run.groups}


def _evaluate(hurt: FaultySwarm, text: Sequence[str], windows: int) -> dict[str, Any]:
    """What a client that has just come finds the model to be worth."""
    entry = [word for address in hurt.bootstraps.values() for word in ("--peer", address)]
    arguments = [*entry, "--run", hurt.run.run_id, "--windows", str(windows), *text, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "spheroid_node", "eval", *arguments],
        capture_output=True,
        timeout=EVALUATION_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"eval ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    evaluation: dict[str, Any] = json.loads(done.stdout)
    return evaluation


def _look_at_what_is_left(
    invariants: Invariants, processes: Sequence[psutil.Process], ports: Sequence[int]
) -> None:
    """All have left: nothing of them may run, and nobody listen."""
    _, alive = psutil.wait_procs(processes, timeout=ORPHAN_SECONDS)
    for process in alive:
        invariants.broken("left over", "", str(process.pid), str(process))
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                invariants.broken("left over", "", f"port {port}", str(error))


def _play(folder: Path, text: Sequence[str], faults: int, asked: argparse.Namespace) -> Outcome:
    """One of the two swarms, in a process of its own."""
    folder.mkdir(parents=True)
    environment(str(folder))
    run = small_run(folder.name, asked.seed)
    swarm, seconds = folder / "swarm", 60 * asked.minutes
    return asyncio.run(
        play(swarm, run, text, seed=asked.seed, seconds=seconds, faults=faults, kinds=asked.kinds)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="wikitext-2.tar.xz, or a folder with its files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--folder", help="where logs and state stay afterwards; they are removed otherwise")
    asked = parser.parse_args()
    with nullcontext(asked.folder) if asked.folder else tempfile.TemporaryDirectory() as folder:
        data = unpack(Path(asked.data), Path(folder))
        text = ["--data", str(data / "test.txt"), "--held-out", str(data / "valid.txt")]
        with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
            swarms = {
                name: pool.submit(_play, Path(folder) / name, text, faults, asked)
                for name, faults in (("undisturbed", 0), ("storm", asked.faults))
            }
            outcomes = {name: swarm.result() for name, swarm in swarms.items()}
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.summary()}", flush=True)
    undisturbed, storm = outcomes["undisturbed"], outcomes["storm"]
    violations = [*undisturbed.violations, *storm.violations]
    raw = RAW / "chaos" / f"{asked.seed}.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}) + "\n")
    headline = {
        "faults": len(storm.faults),
        "violations": len(violations),
        "ce_delta": round(storm.ce - undisturbed.ce, 4),
        "ce": round(storm.ce, 4),
        "ce_undisturbed": round(undisturbed.ce, 4),
        **{name.replace(" ", "_"): count for name, count in storm.counts.items()},
    }
    print(headline, write_result("chaos", [asked.seed], by_kind(storm.faults), headline))


if __name__ == "__main__":
    main()
