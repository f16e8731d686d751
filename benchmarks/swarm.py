"""A whole swarm on real text, real sockets and real processes: does it learn, and what does the daemon cost?

    python -m benchmarks.swarm --data ../shared/data/wikitext-2.tar.xz --minutes 45

Writes results/swarm.json and results/swarm.png. Four parts, one after the other, on an idle machine: how
long --help takes; tokens/s of the trainer in a node against the same block in a bare PyTorch loop, in
turns; memory of a worker of the demo; and six workers, two a block, that train for --minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_swarm import LocalSwarm, events, local_swarm, pss_mb, wait_for
from benchmarks.report import RESULTS, write_result
from spheroid_node.cli.demo.processes import Child
from spheroid_node.cli.demo.shape import demo_run
from spheroid_node.cli.eval import compose
from spheroid_node.node.client import fetch_model, swarm_client
from spheroid_node.run import RunSpec

RUN_FILE = Path(__file__).parent.parent / "bootstrap" / "runs" / "wikitext-small.toml"
COMMANDS = ("", "bootstrap", "join", "generate", "status", "eval", "export", "demo", "simulate", "gateway")
REPLICAS = 2
TURNS = 3
TURN_SECONDS = 25.0
WINDOWS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="wikitext-2.tar.xz")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--keep", type=Path, help="folder for the raw logs; default: a temporary one")
    parser.add_argument("--bare", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        print(bare_tokens_per_second(arguments.data, arguments.bare))
        return
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="swarm-benchmark-"))
    try:
        report(measure(arguments, folder))
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    text = unpack(arguments.data, folder)
    measured: dict[str, Any] = {"help": help_seconds()}
    say("help", measured["help"])
    measured["ratio"] = daemon_ratio(folder / "ratio", text)
    say("ratio", measured["ratio"])
    measured["pss_mb"] = demo_memory(folder / "memory")
    say("memory", measured["pss_mb"])
    measured["learning"] = learn(folder / "learning", text, arguments.minutes)
    say("learning", measured["learning"]["summary"])
    return measured


def say(part: str, what: Any) -> None:
    print(part, json.dumps(what), flush=True)


def unpack(archive: Path, folder: Path) -> tuple[Path, Path]:
    """train.txt and valid.txt of the archive."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "wikitext-2" / "train.txt", folder / "wikitext-2" / "valid.txt"


def small_run(**timing: float) -> RunSpec:
    """The run of wikitext-small.toml, its rounds counted from now."""
    run = RunSpec.from_toml(RUN_FILE)
    timing = {"genesis": float(int(time.time())), **timing}
    return run.model_copy(update={"round": run.round.model_copy(update=timing)})


# --- how long --help takes ------------------------------------------------------------------------


def help_seconds() -> dict[str, float]:
    """Median of three, by command."""
    return {
        command or "spheroid-node": round(
            statistics.median(timed([*command.split(), "--help"]) for _ in range(3)), 3
        )
        for command in COMMANDS
    }


def timed(arguments: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "spheroid_node", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


# --- the daemon's cost ----------------------------------------------------------------------------


def daemon_ratio(folder: Path, text: tuple[Path, Path]) -> dict[str, Any]:
    """Tokens/s in turns: the trainer of a node that owns block 0, and a bare loop of the same block."""
    inside, bare = [], []
    for turn in range(TURNS):
        bare.append(run_bare(text[0]))
        inside.append(run_inside(folder / str(turn), text))
    ratio = statistics.median(inside) / statistics.median(bare)
    return {"inside": inside, "bare": bare, "ratio": round(ratio, 3)}


def run_inside(folder: Path, text: tuple[Path, Path]) -> float:
    with local_swarm(folder, small_run(period=TURN_SECONDS, settle=4.0)) as swarm:
        worker = swarm.join(0, "worker", text_options(text))
        # The first round is short and cold; two whole ones count.
        trained = wait_for("three rounds", lambda: done(worker, "round.trained", 3), 60 + 5 * TURN_SECONDS)[
            1:
        ]
    return sum(event["tokens"] for event in trained) / sum(event["seconds"] for event in trained)


def run_bare(train: Path) -> float:
    """In a process of its own, like the trainer, and with one thread."""
    command = [sys.executable, __file__, "--data", str(train), "--bare", str(2 * TURN_SECONDS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def bare_tokens_per_second(train: Path, seconds: float) -> float:
    """Block 0 of the small shape in a loop without any of our training code."""
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    from spheroid_node.model.composed import Hop
    from spheroid_node.model.initial import initial_vector
    from spheroid_node.model.parameters import group_module, unflatten_

    torch.set_num_threads(1)
    run = small_run()
    hop = Hop(run, 0)
    for group in run.worker_groups(0):
        unflatten_(group_module(hop, group), initial_vector(run, group))
    batch, window, width = run.training.batch, run.model.window, run.model.width
    text = torch.from_numpy(np.fromfile(train, dtype=np.uint8)).long()
    optimiser = torch.optim.AdamW(hop.parameters(), lr=run.training.learning_rate, fused=True)
    codes, generator = hop.interface.codes(), torch.Generator().manual_seed(0)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        starts = torch.randint(len(text) - window - 1, (batch,), generator=generator)
        windows = text[starts[:, None] + torch.arange(window + 1)]
        inputs, targets = windows[:, :-1], windows[:, 1:]
        sigma = hop.schedule.sample(0, torch.rand(batch, generator=generator))
        noisy = codes[targets] + sigma[:, None, None] * torch.randn(batch, window, width, generator=generator)
        _, logits = hop.predict(inputs, torch.zeros_like(noisy), noisy, sigma)
        evidence = noisy @ codes.T / sigma[:, None, None].square()
        loss = cross_entropy((logits + evidence).flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hop.parameters(), run.training.clip_norm)
        optimiser.step()
        steps += 1
    return steps * batch * window / (time.perf_counter() - began)


# --- memory ---------------------------------------------------------------------------------------


def demo_memory(folder: Path) -> list[float]:
    """MB of each worker of the demo's swarm, with its trainer and libp2p daemon, after three rounds."""
    run = demo_run(float(int(time.time())))
    with local_swarm(folder, run) as swarm:
        workers = [swarm.join(block, f"block-{block}") for block in range(run.model.blocks)]
        for worker in workers:
            wait_for("three rounds", lambda worker=worker: done(worker, "round.trained", 3), 240)
        return [round(pss_mb(worker.process.pid), 1) for worker in workers]


# --- learning -------------------------------------------------------------------------------------


def learn(folder: Path, text: tuple[Path, Path], minutes: float) -> dict[str, Any]:
    """Six workers, two a block: the from-noise CE of every round, and what it took."""
    run = small_run()
    with local_swarm(folder, run) as swarm:
        for replica in range(REPLICAS):
            for block in range(run.model.blocks):
                swarm.join(block, f"block-{block}-replica-{replica}", text_options(text))
        for worker in swarm.workers.values():
            wait_for("all workers", lambda worker=worker: done(worker, "node.started", 1), 300)
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            time.sleep(5)
            ended = [name for name, worker in swarm.workers.items() if worker.process.poll() is not None]
            if ended:
                raise RuntimeError(f"{ended} ended during the run")
        seconds = time.monotonic() - began
        final = asyncio.run(evaluate(swarm, text[1]))
        workers = {name: account(worker) for name, worker in swarm.workers.items()}
        rounds = by_round(list(swarm.workers.values()), run.model.blocks)
    summary = {
        "minutes": round(seconds / 60, 1),
        "bytes_moved": sum(worker["bytes_in"] for worker in workers.values()),
        "bytes_out": sum(worker["bytes_out"] for worker in workers.values()),
        "final": final,
    }
    return {"run": run.model_dump(mode="json"), "rounds": rounds, "workers": workers, "summary": summary}


async def evaluate(swarm: LocalSwarm, valid: Path) -> dict[str, float]:
    """The newest model on more held-out text than the workers look at between rounds."""
    import numpy as np

    from spheroid_node.training.evaluation import from_noise
    from spheroid_node.training.text import held_out_windows

    async with swarm_client(swarm.config()) as client:
        vectors, _ = await fetch_model(client)
    held_out = np.fromfile(valid, dtype=np.uint8)
    windows = held_out_windows(held_out, WINDOWS, swarm.run.model.window)
    measured = from_noise(compose(swarm.run, vectors), windows)
    by_block = {f"ce_block_{block}": ce for block, ce in enumerate(measured.ce)}
    return {**by_block, "ce": measured.ce_readout, "ce_mean_log_probs": measured.ce_mean_log_probs}


def account(worker: Child) -> dict[str, Any]:
    """What one worker did."""
    trained, traffic = events(worker, "round.trained"), events(worker, "node.traffic")
    receipts = [event["verdict"] for event in events(worker, "round.receipt")]
    training: float = sum(event["seconds"] for event in trained)  # type: ignore[misc]
    tokens: int = sum(event["tokens"] for event in trained)  # type: ignore[misc]
    return {
        "rounds": len(trained),
        "tokens": tokens,
        "tokens_per_s": round(tokens / training, 1) if training else 0.0,
        "training_seconds": round(training, 1),
        "bytes_in": traffic[-1]["bytes_in"] if traffic else 0,
        "bytes_out": traffic[-1]["bytes_out"] if traffic else 0,
        "led": len(events(worker, "round.led")),
        **{verdict: receipts.count(verdict) for verdict in ("accepted", "late", "refused")},
    }


def by_round(workers: Sequence[Child], blocks: int) -> list[dict[str, Any]]:
    """From-noise CE after every block at the versions each round began with: mean over the replicas."""
    measured: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        for event in events(worker, "round.evaluated"):
            measured[event["round"]][event["block"]].append(event["ce"][-1])  # type: ignore[index]
    return [
        {
            "round": number,
            **{f"ce_block_{block}": statistics.fmean(values) for block, values in sorted(of_block.items())},
        }
        for number, of_block in sorted(measured.items())
        if len(of_block) == blocks
    ]


# --- shared ---------------------------------------------------------------------------------------


def text_options(text: tuple[Path, Path]) -> list[str]:
    return ["--data", str(text[0]), "--held-out", str(text[1])]


def done(worker: Child, name: str, count: int) -> list[dict[str, Any]] | None:
    """The first ``count`` events of that name, once there are as many."""
    if worker.process.poll() is not None:
        raise RuntimeError(f"{worker.name} ended: {worker.last_line}")
    found = events(worker, name)
    return found[:count] if len(found) >= count else None


def report(measured: dict[str, Any]) -> None:
    learning = measured["learning"]
    last = f"ce_block_{learning['run']['model']['blocks'] - 1}"
    speeds = [worker["tokens_per_s"] for worker in learning["workers"].values()]
    headline = {
        "ce_first": learning["rounds"][0][last],
        "ce_last": learning["summary"]["final"]["ce"],
        "minutes": learning["summary"]["minutes"],
        "workers": len(learning["workers"]),
        "bytes_moved": learning["summary"]["bytes_moved"],
        "tokens_per_s": round(sum(speeds), 1),
        "daemon_ratio": measured["ratio"]["ratio"],
        "worker_pss_mb": max(measured["pss_mb"]),
        "help_s": max(measured["help"].values()),
    }
    rows = [
        *({"part": "learning", **row} for row in learning["rounds"]),
        *({"part": "worker", "name": name, **row} for name, row in learning["workers"].items()),
        {"part": "final", **learning["summary"]},
        {"part": "ratio", **measured["ratio"]},
        {"part": "memory", "worker_pss_mb": measured["pss_mb"]},
        {"part": "help", **measured["help"]},
    ]
    write_result("swarm", [learning["run"]["seed"]], rows, headline)
    draw(learning, headline)
    say("headline", headline)


def draw(learning: dict[str, Any], headline: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rounds = learning["rounds"]
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    blocks = learning["run"]["model"]["blocks"]
    for block in range(blocks):
        label = f"after block {block}" + (" (the whole chain)" if block == blocks - 1 else "")
        values = [row[f"ce_block_{block}"] for row in rounds]
        axis.plot([row["round"] - rounds[0]["round"] for row in rounds], values, label=label, lw=1.6)
    axis.set_xlabel(f"round ({learning['run']['round']['period']:.0f} s each)")
    axis.set_ylabel("from-noise CE on held-out text, nats a byte")
    axis.set_title(
        f"Six workers, two a block, WikiText-2: {headline['ce_first']:.2f} → {headline['ce_last']:.3f} "
        f"in {headline['minutes']:.0f} minutes"
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(RESULTS / "swarm.png", dpi=150)


if __name__ == "__main__":
    main()
