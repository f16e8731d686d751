"""The course of a demo: start a swarm, watch it train, take its model, let it speak, stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from spheroid_node.cli.demo.chart import draw_chart
from spheroid_node.cli.demo.processes import STOP_SECONDS, Child, Children
from spheroid_node.cli.demo.view import View
from spheroid_node.cli.eval import compose, evaluate
from spheroid_node.cli.generate import Request, write
from spheroid_node.config import LOOPBACK, NodeConfig
from spheroid_node.errors import DemoFailed
from spheroid_node.node.bootstrap import JOIN_FILE
from spheroid_node.node.client import Client, chain_finder, fetch_model, swarm_client
from spheroid_node.node.snapshot import Curve, Snapshot, collect
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RunSpec
from spheroid_node.serving.remote import Generation
from spheroid_node.serving.stats import GenerationStats
from spheroid_node.training.checkpoint import export_model

START_SECONDS = 240.0
"""How long all processes together may take until every one is in the swarm."""

SHOW_SECONDS = 1.0
WINDOWS = 64
SEED = 0
TEMPERATURE = 0.7
INTERRUPTED = 130
HARD_LIMIT = 9.5
"""Seconds after the first Ctrl-C at which the demo ends whatever still holds it."""


@dataclass(frozen=True)
class Plan:
    """What the user asked for."""

    run: RunSpec
    replicas: int
    minutes: float
    data: tuple[str, ...]
    held_out: tuple[str, ...]
    prompt: bytes
    length: int
    directory: Path


@dataclass(frozen=True)
class Result:
    """What came of it."""

    blocks: int
    first_ce: float | None
    final_ce: float
    stats: GenerationStats


class Session:
    """One demo. ``children`` is opened and closed by the caller."""

    def __init__(self, plan: Plan, children: Children, view: View) -> None:
        self._plan, self._children, self._view = plan, children, view
        self._workers: dict[int, list[Child]] = {}
        self._curve = Curve()
        self._interrupts = 0
        self._stop_at = 0.0

    async def run(self) -> Result | None:
        """The whole course; None if the user stopped it. All processes have ended when this returns."""
        self._catch_signals()
        try:
            return await self._course()
        except asyncio.CancelledError:
            if not self._interrupts:
                raise
            return None
        finally:
            left = self._stop_at - asyncio.get_running_loop().time() if self._interrupts else STOP_SECONDS
            await self._children.stop(max(0.0, left))

    async def _course(self) -> Result:
        async with AsyncExitStack() as stack:
            with self._view:
                address = await self._start_bootstrap()
                self._start_workers(address)
                client = await stack.enter_async_context(swarm_client(self._client_config(address)))
                await self._train(client)
                final_ce = await self._take_model(client)
            stats = await self._speak(client)
        first = next(iter(self._curve.by_round().values()), None)
        return Result(self._plan.run.model.blocks, first, final_ce, stats)

    # --- starting ---------------------------------------------------------------------------------

    async def _start_bootstrap(self) -> str:
        """Start the bootstrap and wait for its address."""
        directory = self._plan.directory
        join_line = directory / "state" / "bootstrap" / JOIN_FILE
        self._view.phase("starting the bootstrap")
        arguments = [
            "--run",
            str(directory / "run.toml"),
            "--state-dir",
            str(directory / "state" / "bootstrap"),
        ]
        child = self._children.start("bootstrap", ["bootstrap", *arguments, *self._shared()])
        async with self._start_limit("the bootstrap did not start"):
            while not join_line.exists():
                self._check([child])
                await asyncio.sleep(0.1)
        return join_line.read_text(encoding="utf-8").split()[-1]

    def _start_workers(self, address: str) -> None:
        plan = self._plan
        texts = [f"--data={path}" for path in plan.data] + [f"--held-out={path}" for path in plan.held_out]
        for block in range(plan.run.model.blocks):
            for replica in range(plan.replicas):
                name = f"block-{block}-replica-{replica}"
                arguments = [
                    f"--block={block}",
                    f"--peer={address}",
                    f"--run={plan.run.run_id}",
                    "--threads=1",
                ]
                arguments += [f"--state-dir={plan.directory / 'state' / name}", *texts]
                child = self._children.start(name, ["join", *arguments, *self._shared()])
                self._workers.setdefault(block, []).append(child)

    def _shared(self) -> list[str]:
        return [f"--host={LOOPBACK}", "--log-format=json"]

    def _client_config(self, address: str) -> NodeConfig:
        run_id = self._plan.run.run_id
        return NodeConfig(state_dir=self._plan.directory, peers=(address,), run=run_id, host=LOOPBACK)

    # --- training ---------------------------------------------------------------------------------

    async def _train(self, client: Client) -> None:
        """Show the swarm until all have joined, and then until its time is over and a round with it."""
        expected = self._plan.replicas * self._plan.run.model.blocks
        async with self._start_limit("not all workers joined in time"):
            while True:
                snapshot = await self._look(client, None)
                if len(snapshot.replicas) >= expected:
                    break
                await asyncio.sleep(SHOW_SECONDS)
        slots = Slots.of(self._plan.run.round)
        until = slots.end(slots.round_at(client.dht.time() + 60 * self._plan.minutes))
        while (left := until - client.dht.time()) > 0:
            await self._look(client, left)
            await asyncio.sleep(min(SHOW_SECONDS, left))

    async def _look(self, client: Client, seconds_left: float | None) -> Snapshot:
        for workers in self._workers.values():
            self._check(workers)
        snapshot = await collect(client.directory, client.run, client.dht.time())
        self._curve.add(snapshot)
        if seconds_left is None:
            self._view.phase(f"{len(snapshot.replicas)} of {self._children.count - 1} workers have joined")
        self._view.show(snapshot, list(self._curve.by_round().values()), seconds_left)
        return snapshot

    def _check(self, children: list[Child]) -> None:
        """Raise :class:`DemoFailed` if none of ``children`` runs any more."""
        ended = self._children.ended()
        if all(child in ended for child in children):
            child = children[0]
            raise DemoFailed(f"{child.name} said: {child.last_line}", str(child.log.parent))

    def _start_limit(self, problem: str) -> _Limit:
        return _Limit(START_SECONDS, DemoFailed(problem, str(self._plan.directory / "logs")))

    # --- the model and its text -------------------------------------------------------------------

    async def _take_model(self, client: Client) -> float:
        """Export and measure the newest model, draw its curve, and return its from-noise CE."""
        plan = self._plan
        self._view.phase("fetching and measuring the model")
        vectors, versions = await fetch_model(client)
        config = NodeConfig(state_dir=plan.directory, data=plan.data, held_out=plan.held_out)
        evaluation = await asyncio.to_thread(evaluate, compose(plan.run, vectors), config, WINDOWS)
        export_model(plan.directory / "model", plan.run, vectors, versions, asdict(evaluation))
        draw_chart(plan.directory / "ce.png", plan.run, self._curve.by_round(), evaluation.ce_readout)
        return evaluation.ce_readout

    async def _speak(self, client: Client) -> GenerationStats:
        """Print the prompt and what the chain makes of it, as it comes."""
        request = Request(self._plan.prompt, self._plan.length, SEED, TEMPERATURE, "speculative")
        finder = chain_finder(client, Generation(request.seed, request.temperature))
        click.echo(request.prompt, nl=False)
        return await write(client.run, finder, request, sys.stdout.buffer)

    # --- stopping ---------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, task)

    def _interrupt(self, task: asyncio.Task[object]) -> None:
        """First: all leave cleanly within ten seconds. Second: all are killed now."""
        self._interrupts += 1
        if self._interrupts > 1:
            self._leave_now()
        loop = asyncio.get_running_loop()
        self._stop_at = loop.time() + STOP_SECONDS
        loop.call_later(HARD_LIMIT, self._leave_now)
        self._view.phase("stopping; Ctrl-C again stops at once")
        self._children.ask_to_leave()
        task.cancel()

    def _leave_now(self) -> None:
        self._children.kill()
        self._view.__exit__(KeyboardInterrupt, None, None)
        os._exit(INTERRUPTED)


class _Limit:
    """``async with``: raises ``error`` in place of a time-out after ``seconds``."""

    def __init__(self, seconds: float, error: Exception) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._error = error

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *exception: object) -> None:
        try:
            await self._timeout.__aexit__(*exception)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise self._error from error
