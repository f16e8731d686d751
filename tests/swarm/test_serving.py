"""Text from a chain of processes is the text of the same model in one process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from spheroid_node.model import ComposedModel, load
from spheroid_node.net.directory import Directory
from spheroid_node.node.client import Client, chain_finder, swarm_client
from spheroid_node.node.snapshot import collect
from spheroid_node.serving.decoders import autoregressive, one_sweep
from spheroid_node.serving.finding import ChainFinder, write_on
from spheroid_node.serving.local import LocalChain
from spheroid_node.serving.ports import NodeDirectory
from spheroid_node.serving.remote import Generation
from spheroid_node.serving.routes import Versions
from spheroid_node.wire.records import NodeRecord

from .conftest import Node, Swarm, wait_for

PROMPTS = [b"The class statement ", b"import a", "Σ and é ".encode()]


@pytest.fixture(scope="module")
def resting(swarm: Swarm) -> Iterator[Swarm]:
    """The swarm with its trainers halted, so that versions stand still while they are compared."""
    for node in swarm.nodes:
        wait_for("a few versions", lambda node=node: len(node.events("round.version")) >= 4 or None)
    with _halted(swarm):
        wait_for("the last round to settle", lambda: asyncio.run(_settled(swarm)) or None)
        yield swarm


@contextmanager
def _halted(swarm: Swarm) -> Iterator[None]:
    """No trainer of the swarm runs; nor do those by which nodes replace one that does not answer."""
    halted, over = set(), threading.Event()

    def halt() -> None:
        while not over.wait(1.0):
            started = [event for node in swarm.nodes for event in node.events("trainer.started")[-1:]]
            for pid in {event["pid"] for event in started} - halted:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                halted.add(pid)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for pid in halted:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def _settled(swarm: Swarm) -> bool:
    async with swarm_client(swarm.config()) as client:
        first = await collect(client.directory, swarm.run, client.dht.time())
        await asyncio.sleep(swarm.run.round.period)
        second = await collect(client.directory, swarm.run, client.dht.time())
    versions = second.versions
    if versions.keys() != set(swarm.run.groups):
        return False  # a peer that is too busy to answer
    return first.versions == versions and all(
        replica.version == versions[f"block-{replica.block}"].version
        and replica.interface_version == versions["interface"].version
        for replica in second.replicas
    )


@pytest.fixture(scope="module")
def exported(resting: Swarm, tmp_path_factory: pytest.TempPathFactory) -> ComposedModel:
    directory = tmp_path_factory.mktemp("export") / "model"
    done = resting.command("export", str(directory))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in Path(directory).iterdir()} == {
        "model.safetensors", "config.json", "README.md"
    }  # fmt: skip
    return load(directory)


@pytest.mark.timeout(400)
def test_logits_and_text_of_three_processes_equal_those_of_one(
    resting: Swarm, exported: ComposedModel
) -> None:
    async def compare() -> None:
        async with swarm_client(resting.config()) as client:
            for seed, temperature in ((0, 0.0), (5, 0.9)):
                for prompt in PROMPTS:
                    remote = await chain_finder(client, Generation(seed, temperature, logits=True)).open()
                    local = LocalChain(exported, seed, temperature, logits=True)
                    assert len(remote.route.hops) == 3
                    theirs = await remote.sweep(0, prompt, decide=len(prompt))
                    ours = await local.sweep(0, prompt, decide=len(prompt))
                    assert theirs.tokens == ours.tokens
                    assert theirs.logits is not None and ours.logits is not None
                    assert np.abs(theirs.logits - ours.logits).max() < 1e-4
                    assert np.abs(ours.logits).max() > 0.1, "an untrained model would compare anything"
                    for chain in (remote, local):
                        await chain.sweep(0, prompt)  # back to the start for the decoder
                    texts = [
                        b"".join([piece async for piece in autoregressive(chain, prompt, 48)])
                        for chain in (remote, local)
                    ]
                    assert texts[0] == texts[1]
                    assert len(texts[0]) == 48
                    swept = [
                        b"".join([piece async for piece in one_sweep(chain, prompt, 40, 32)])
                        for chain in (remote, local)
                    ]
                    assert swept[0] == swept[1]
                    assert len(swept[0]) == 40
                    await remote.close()
                    await local.close()

    asyncio.run(compare())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("decoder", ["speculative", "autoregressive", "one-sweep"])
def test_the_generate_command_prints_what_the_exported_model_says(
    resting: Swarm, exported: ComposedModel, decoder: str
) -> None:
    async def local() -> bytes:
        chain = LocalChain(exported, 3, 0.7)
        decode = (
            autoregressive(chain, PROMPTS[0], 60)
            if decoder != "one-sweep"
            else one_sweep(chain, PROMPTS[0], 60, resting.run.model.window)
        )
        return b"".join([piece async for piece in decode])

    done = resting.command(
        "generate", PROMPTS[0].decode(), "--bytes", "60", "--seed", "3", "--temperature", "0.7",
        "--decode", decoder, "--stats",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = asyncio.run(local()).decode(errors="replace")
    assert done.stdout.decode().removeprefix(PROMPTS[0].decode()).rstrip("\n") == expected.rstrip("\n")
    assert b"sweeps" in done.stderr


@pytest.mark.timeout(200)
def test_status_shows_every_replica_and_version(resting: Swarm) -> None:
    done = resting.command("status", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["run"] == resting.run.run_id
    assert sorted(replica["block"] for replica in shown["replicas"]) == [0, 0, 1, 1, 2, 2]
    assert {replica["peer"] for replica in shown["replicas"]} == {
        node.started["peer"] for node in resting.nodes
    }
    assert all(shown["versions"][group]["version"] >= 1 for group in resting.run.groups)


@pytest.mark.timeout(200)
def test_eval_measures_the_swarm(resting: Swarm, exported: ComposedModel) -> None:
    from spheroid_node.training.evaluation import from_noise
    from spheroid_node.training.text import held_out_windows, load_text

    done = resting.command("eval", "--windows", "8", "--json")
    assert done.returncode == 0, done.stderr
    text = load_text(resting.run.data, (), (), resting.run.model.window)
    expected = from_noise(exported, held_out_windows(text.held_out, 8, resting.run.model.window))
    assert json.loads(done.stdout)["ce"] == pytest.approx(expected.ce_readout, abs=1e-5)
    assert expected.ce_readout < 5.0


# Last, since a killed node is remembered for a while.


class WhileItLives:
    """A directory that knows no other replica of a node's block, as long as that one lives."""

    def __init__(self, directory: Directory, node: Node) -> None:
        self._directory, self._node = directory, node

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        found = await self._directory.nodes(block)
        if block != self._node.block or self._node.child.process.poll() is not None:
            return found
        own = self._node.started["peer"]
        return {peer: record for peer, record in found.items() if peer == own}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_hop_killed_in_the_middle_of_a_text_does_not_show_in_it(resting: Swarm, block: int) -> None:
    mortal = resting.join(block, f"mortal-{block}")
    resting.nodes.remove(mortal)
    mortal.wait_for("trainer.started")
    os.kill(mortal.trainer_pid, signal.SIGSTOP)  # it need not train
    mortal.wait_for("node.started")

    def kill(text: bytes) -> None:
        if len(text) >= 32 and mortal.child.process.poll() is None:
            mortal.signal(signal.SIGKILL)
            mortal.child.process.wait()

    async def write(client: Client, directory: NodeDirectory, versions: Versions | None) -> ChainFinder:
        finder = ChainFinder(
            directory, client.run, lambda address: client.dial(address, "hop"), Generation(11, 0.8)
        )
        finder.versions = versions
        texts.append(b"")
        async for decided in write_on(finder, "speculative", client.run, PROMPTS[0], 120):
            texts[-1] += decided
            if versions is None:
                kill(texts[-1])
        return finder

    async def compare() -> None:
        async with swarm_client(resting.config()) as client:
            disturbed = await write(client, WhileItLives(client.directory, mortal), None)
            quiet = await write(client, client.directory, disturbed.versions)
            assert quiet.versions == disturbed.versions
            assert (disturbed.found, quiet.found) == (2, 1)

    texts: list[bytes] = []
    try:
        wait_for("its record", lambda: _is_known(resting, mortal) or None)
        asyncio.run(compare())
    finally:
        if mortal.child.process.poll() is None:
            os.killpg(mortal.pid, signal.SIGKILL)
    assert texts[0] == texts[1] and len(texts[0]) == 120


def _is_known(swarm: Swarm, node: Node) -> bool:
    shown = json.loads(swarm.command("status", "--json").stdout)
    return any(
        replica["peer"] == node.started["peer"] and replica["state"] == "online"
        for replica in shown["replicas"]
    )
