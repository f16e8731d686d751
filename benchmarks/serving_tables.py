"""The tables of :mod:`benchmarks.serving`, one function each."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.chain import Swarm, Timed, swarm_of
from benchmarks.hop import LOOPBACK
from benchmarks.report import Found
from benchmarks.wan import Wan
from spheroid_node.serving.decoders import DecoderName, autoregressive, decode

COUNT = 128
TEMPERATURES = (0.0, 0.7, 1.0)
DELAYS = (0.0, 0.010, 0.025, 0.050, 0.100)
SESSIONS = (1, 4, 16, 64)
BRANCHES = 8
"""Of a line of drafts."""
AT_ONCE = 2
"""Texts, where nothing is timed."""
KILL_AT = 32
DECODERS: tuple[DecoderName, ...] = ("autoregressive", "speculative", "one-sweep")


# --- bytes a sweep --------------------------------------------------------------------------------------


async def drafts(asked: argparse.Namespace, prompts: Sequence[bytes]) -> Found:
    """Bytes a sweep over links of 25 ms, and whether the text is that of one byte a sweep."""
    rows: list[dict[str, Any]] = []
    for readout, directory in (("last", "chain"), ("mean", "mean")):
        async with swarm_of(asked.models / directory) as swarm:
            for temperature in TEMPERATURES:
                expected = await _texts(swarm, prompts, temperature, None)
                for branches in (0, BRANCHES):
                    async with swarm.delayed(0.025):
                        found = await _texts(swarm, prompts, temperature, branches)
                    pairs = zip(found, expected, strict=True)
                    row = {
                        "readout": readout,
                        "temperature": temperature,
                        "branches": branches,
                        "bytes_per_sweep": COUNT * len(found) / sum(sweeps for _, sweeps in found),
                        "identical": sum(text == known for (text, _), (known, _) in pairs),
                        "texts": len(found),
                    }
                    rows.append(row)
                    print(row, flush=True)
    headline = {}
    for row in rows:
        key = f"bytes_per_sweep_t{row['temperature']:g}".replace(".", "")
        key += "_branches" if row["branches"] else ""
        headline[key if row["readout"] == "mean" else f"{key}_last"] = round(row["bytes_per_sweep"], 3)
    same, texts_in_all = (sum(row[field] for row in rows) for field in ("identical", "texts"))
    return Found(rows, headline | {"identical_fraction": same / texts_in_all})


async def _texts(
    swarm: Swarm, prompts: Sequence[bytes], temperature: float, branches: int | None
) -> list[tuple[bytes, int]]:
    """The text after each prompt and the sweeps it took; ``branches`` None: one byte a sweep."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int, prompt: bytes) -> tuple[bytes, int]:
        async with slots, swarm.chain(seed, temperature) as chain:
            if branches is None:
                return b"".join([part async for part in autoregressive(chain, prompt, COUNT)]), COUNT
            sweeps = [sweep async for sweep in chain.write(0, prompt, COUNT, branches=branches)]
            return b"".join(sweep.tokens for sweep in sweeps), len({sweep.line for sweep in sweeps})

    return await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))


# --- time over slow links -------------------------------------------------------------------------------


async def delays(asked: argparse.Namespace, prompts: Sequence[bytes]) -> Found:
    """Seconds to 128 bytes by link delay, for each decoder and for a plain pipeline, in turns."""
    from spheroid_node.model import load

    judge, mean = load(asked.models / "whole"), asked.models / "mean"
    rows: list[dict[str, Any]] = []
    medians: dict[tuple[float, str], float] = {}
    async with swarm_of(mean) as swarm:
        for delay in DELAYS:
            found: dict[str, list[Timed]] = defaultdict(list)
            plain: list[float] = []
            async with swarm.delayed(delay):
                for trial in range(asked.trials):
                    prompt = prompts[trial]
                    for decoder in DECODERS:
                        found[decoder].append(await swarm.text(decoder, prompt, COUNT, trial, 0.7))
                    plain.append(await plain_seconds(mean, delay, prompt, trial, 0.7))
                    same = found["autoregressive"][-1].text == found["speculative"][-1].text
                    if not same:
                        raise SystemExit(f"the text differs at a delay of {delay} s, trial {trial}")
            medians |= {
                (delay, decoder): statistics.median(timed.seconds for timed in found[decoder])
                for decoder in DECODERS
            }
            medians[delay, "plain"] = statistics.median(plain)
            for name in (*DECODERS, "plain"):
                row: dict[str, Any] = {"delay": delay, "decoder": name, "seconds": medians[delay, name]}
                row["speedup"] = medians[delay, "autoregressive"] / medians[delay, name]
                if name != "plain":
                    texts = [(prompts[trial], timed.text) for trial, timed in enumerate(found[name])]
                    row["ce"] = judged(judge, texts)
                    row["sweeps"] = statistics.median(timed.stats.sweeps for timed in found[name])
                rows.append(row)
    return Found(rows, _speedups(medians))


def _speedups(medians: Mapping[tuple[float, str], float]) -> dict[str, float]:
    def speedup(delay: float, decoder: str) -> float:
        return round(medians[delay, "autoregressive"] / medians[delay, decoder], 2)

    return {f"speedup_{1000 * delay:.0f}ms": speedup(delay, "speculative") for delay in DELAYS} | {
        "one_sweep_speedup_50ms": speedup(0.050, "one-sweep"),
        "plain_over_autoregressive_25ms": round(
            medians[0.025, "plain"] / medians[0.025, "autoregressive"], 2
        ),
    }


def judged(judge: Any, texts: Sequence[tuple[bytes, bytes]]) -> float:
    """Cross-entropy of the texts after their prompts under another model, nats a byte."""
    return statistics.fmean(judged_by_place(judge, texts))


def judged_by_place(judge: Any, texts: Sequence[tuple[bytes, bytes]]) -> list[float]:
    """The same for the first byte after a prompt, the second, and so on: means over the texts."""
    import torch
    from torch.nn import functional as F

    losses = []
    with torch.inference_mode():
        for prompt, text in texts:
            whole = torch.tensor([[*prompt, *text]])
            noise = torch.zeros(1, whole.shape[1] - 1, judge.run.model.width)
            _, log_probs_BTV = judge(whole[:, :-1], noise)
            wanted = whole[0, len(prompt) :]
            losses.append(F.nll_loss(log_probs_BTV[0, len(prompt) - 1 :], wanted, reduction="none"))
    means: list[float] = torch.stack(losses).mean(0).tolist()
    return means


async def one_sweep(asked: argparse.Namespace, prompts: Sequence[bytes]) -> Found:
    """How good the text of one-sweep is, by the cross-entropy of a model of full depth; others beside it."""
    from spheroid_node.model import load
    from spheroid_node.serving.local import LocalChain

    judge = load(asked.models / "whole")
    cases: list[tuple[str, DecoderName, str]] = [
        ("chain", "autoregressive", "one byte a sweep"),
        ("chain", "one-sweep", "one-sweep"),
        ("suffix", "one-sweep", "one-sweep, trained for it"),
        ("suffix", "autoregressive", "one byte a sweep, trained for one-sweep"),
    ]
    rows = []
    for temperature in TEMPERATURES:
        for directory, decoder, what in cases:
            model, texts = load(asked.models / directory), []
            for seed, prompt in enumerate(prompts):
                chain = LocalChain(model, seed, temperature)
                parts = [part async for part in decode(decoder, model.run, chain, prompt, COUNT)]
                texts.append((prompt, b"".join(parts)))
            by_place = judged_by_place(judge, texts)
            row = {"what": what, "temperature": temperature, "ce": statistics.fmean(by_place)}
            row |= {"ce_first": by_place[0], "ce_first_8": statistics.fmean(by_place[:8])}
            rows.append(row | {"texts": len(texts)})
            print(row, flush=True)
    return Found(rows, {})


async def plain_seconds(model: Path, delay: float, prompt: bytes, seed: int, temperature: float) -> float:
    """Seconds to 128 bytes of a plain pipeline of the same blocks over links of the same delay."""
    from spheroid_node.training.checkpoint import import_model

    blocks = import_model(model)[0].model.blocks
    async with AsyncExitStack() as stack:
        wan = await stack.enter_async_context(Wan(delay=delay))
        ports: list[int] = []
        for block in reversed(range(blocks)):
            port = await _start_plain(stack, model, block, ports[-1] if ports else None, seed, temperature)
            ports.append(await wan.forward(LOOPBACK, port) if delay else port)
        reader, _last = await asyncio.open_connection(LOOPBACK, ports[0])
        await asyncio.sleep(2 * delay + 0.2)  # so that it is the first that the last hop hears of
        _, writer = await asyncio.open_connection(LOOPBACK, ports[-1])
        return await _drive_plain(reader, writer, prompt)


async def _start_plain(
    stack: AsyncExitStack, model: Path, block: int, after: int | None, seed: int, temperature: float
) -> int:
    arguments = [] if after is None else ["--next", str(after)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.plain_hop", "--model", str(model), "--block", str(block),
        "--seed", str(seed), "--temperature", str(temperature), *arguments,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    stack.callback(lambda: process.kill() if process.returncode is None else None)
    assert process.stdout is not None
    return int(await process.stdout.readline())


async def _drive_plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: bytes) -> float:
    from benchmarks.plain_hop import HEADER

    for position, token in enumerate(prompt[:-1]):
        writer.write(HEADER.pack(position, token))
    await reader.readexactly(len(prompt) - 1)
    began, token = time.perf_counter(), prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + COUNT):
        writer.write(HEADER.pack(position, token))
        (token,) = await reader.readexactly(1)
    return time.perf_counter() - began


# --- a hop that dies ------------------------------------------------------------------------------------


async def failover(asked: argparse.Namespace, prompts: Sequence[bytes]) -> Found:
    """A middle hop is killed at byte 32: how long until the next byte, and is the text the same."""
    from spheroid_node.serving.finding import write_on

    pauses, identical = [], 0
    async with swarm_of(asked.models / "chain") as swarm:
        for trial in range(asked.kills):
            prompt = prompts[trial % len(prompts)]
            expected = (await swarm.text("autoregressive", prompt, COUNT, trial, 0.7)).text
            spare = await swarm.start(1)
            text, longest, last, killed = b"", 0.0, time.perf_counter(), False
            finder = swarm.finder(trial, 0.7)
            async for part in write_on(finder, "speculative", swarm.run, prompt, COUNT):
                now = time.perf_counter()
                if killed:
                    longest = max(longest, now - last)
                text, last = text + part, now
                if len(text) >= KILL_AT and not killed:
                    killed = True
                    await _kill_used(swarm, finder, spare.peer)
                    last = time.perf_counter()
            pauses.append(longest)
            identical += text == expected
            swarm.replicas = [replica for replica in swarm.replicas if replica.process.returncode is None]
    rows = [
        {
            "median_s": statistics.median(pauses), "worst_s": max(pauses), "identical": identical,
            "trials": len(pauses), "pauses_s": [round(pause, 4) for pause in pauses],
        }
    ]  # fmt: skip
    headline = {
        "failover_median_s": round(statistics.median(pauses), 3),
        "failover_worst_s": round(max(pauses), 3),
        "failover_identical": identical,
    }
    return Found(rows, headline)


async def _kill_used(swarm: Swarm, finder: Any, spare: str) -> None:
    """SIGKILL the replica of block 1 that the text goes through."""
    used = finder.chain.route.hops[1].address.peer
    replica = next(replica for replica in swarm.replicas if replica.peer == used)
    replica.kill()
    await replica.process.wait()


# --- many at once ---------------------------------------------------------------------------------------


async def sessions(asked: argparse.Namespace, prompts: Sequence[bytes]) -> Found:
    """Bytes a second of all sessions together, the slowest against the mean, memory of a hop."""
    import psutil

    rows, headline = [], {}
    async with swarm_of(asked.models / "mean") as swarm:
        for count in SESSIONS:
            totals, worst = [], []
            for trial in range(asked.trials):
                began = time.perf_counter()
                texts = await asyncio.gather(
                    *(
                        swarm.text("speculative", prompts[number % len(prompts)], COUNT, number + trial, 0.7)
                        for number in range(count)
                    )
                )
                totals.append(count * COUNT / (time.perf_counter() - began))
                seconds = [timed.seconds for timed in texts]
                worst.append(max(seconds) / statistics.fmean(seconds))
            memory = max(psutil.Process(r.process.pid).memory_info().rss for r in swarm.replicas)
            rows.append(
                {
                    "sessions": count,
                    "bytes_per_s": statistics.median(totals),
                    "worst_over_mean": statistics.median(worst),
                    "memory_mb": memory / 1e6,
                }
            )
            headline[f"sessions_{count}_worst_over_mean"] = round(statistics.median(worst), 3)
    return Found(rows, headline)


# --- the figure -----------------------------------------------------------------------------------------


def figure(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Seconds to 128 bytes against the delay of a link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    of_delays = [row for row in rows if row["table"] == "delays"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for decoder in (*DECODERS, "plain"):
        points = [(1000 * row["delay"], row["seconds"]) for row in of_delays if row["decoder"] == decoder]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=decoder)
    axes.set_yscale("log")
    axes.set_xlabel("one-way delay of every link, ms")
    axes.set_ylabel(f"seconds to {COUNT} bytes")
    axes.set_title("Three hops")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
