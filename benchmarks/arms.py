"""What the tables of learning share: arms, each played for some seeds in the simulator, kept one by one.

An arm is a run, a method, a regime and a number of workers. Every (arm, seed) is played in a process of its
own, in one thread, and its raw result is written to raw/TABLE/ARM-SEED.json; one that is there is not played
again unless what it depends on has changed. So a long table can be broken off and taken up again.

Held-out cross-entropy is always from noise, on evenly spaced windows of the held-out text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import machine
from spheroid_node.run import DataSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec

RAW = Path(__file__).parent / "raw"
SEEDS = (0, 1, 2)
WINDOWS = 512
"""Of held-out text, 128 bytes each, that an arm is measured on at its end."""
CURVE_WINDOWS = 64
"""And in its course."""
LEARNING_RATE = 4e-3
"""Of 2e-3, 4e-3 and 6e-3 the best for the full depth end to end, and for blocks no worse than 2e-3."""
EVALUATIONS = 8
"""In the course of an arm, about."""


@dataclass(frozen=True)
class Arm:
    """One row of a table."""

    name: str
    run: RunSpec
    tokens: int
    """That each layer of the model is trained on, summed over replicas."""
    method: str = "blocktrain"
    regime: str = "lockstep"
    replicas: int = 1
    """Workers a block."""
    precision: str = "auto"
    attack: str = ""
    hostile: int = 0
    """So many workers, the first ones, hand in what the attack makes of their updates."""
    overlap: bool = False
    """Training goes on while updates travel, as in a node."""

    def key(self, seed: int) -> str:
        """Changes with all that the arm's outcome depends on, except the code."""
        fields = [self.run.run_id, self.tokens, self.method, self.regime, self.replicas, seed, WINDOWS]
        fields += [] if self.precision == "auto" else [self.precision]
        fields += [self.attack, self.hostile] if self.hostile else []
        fields += ["overlap"] if self.overlap else []
        return hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()


def small_run(tokens: int, *, replicas: int = 1, local_steps: int = 50, **changes: Any) -> RunSpec:
    """The small shape: width 128, 4 heads, window 128, three blocks of two layers.

    The learning rate decays to a tenth over ``tokens``. ``changes`` are to sections, by name.
    """
    training = TrainingSpec(local_steps=local_steps, warmup_steps=50, learning_rate=LEARNING_RATE)
    sections: dict[str, Any] = {
        "model": ModelSpec(blocks=3, layers=2, width=128, heads=4, window=128),
        "training": training,
        "round": RoundSpec(period=30.0, settle=4.0),
        "data": DataSpec(name="wikitext-2"),
    }
    for section, values in changes.items():
        if isinstance(values, Mapping):
            before = sections.get(section) or RunSpec.model_fields[section].default
            sections[section] = type(before).model_validate({**before.model_dump(), **values})
        else:
            sections[section] = values
    run = RunSpec(name="small", **sections)
    if run.training.decay_steps:
        return run
    steps = tokens // (replicas * run.training.batch * run.model.window)
    decay = run.training.model_copy(update={"decay_steps": max(1, steps - run.training.warmup_steps)})
    return run.model_copy(update={"training": decay})


# --- playing --------------------------------------------------------------------------------------


def play(table: str, arms: Sequence[Arm], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Raw results of all arms for all seeds, by arm."""
    wanted = [(arm, seed) for seed in options.seeds for arm in arms]
    missing = [(arm, seed) for arm, seed in wanted if _kept(table, arm, seed) is None]
    print(f"{table}: {len(wanted)} plays, {len(wanted) - len(missing)} of them kept", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        text = unpack(Path(options.data), Path(folder))
        list(pool.map(lambda item: _play_apart(table, *item, text), missing))
    return {arm.name: [_result(table, arm, seed) for seed in options.seeds] for arm in arms}


def _play_apart(table: str, arm: Arm, seed: int, text: Path) -> None:
    path = _path(table, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    task = {**asdict(arm), "run": arm.run.model_dump(mode="json"), "seed": seed, "text": str(text)}
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.arms", json.dumps(task), str(path)]
    done = subprocess.run(command, cwd=RAW.parents[1], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{table} {arm.name} seed {seed} failed:\n{done.stderr[-3000:]}")
    ce = json.loads(path.read_text())["ce"]
    print(f"{table} {arm.name} seed {seed}: CE {ce:.4f} in {time.monotonic() - begun:.0f} s", flush=True)


def prepared(arm: Arm, seed: int, text_folder: Path) -> tuple[Any, int]:
    """The simulator's swarm of an arm and seed before its first round, and the number of its rounds."""
    import torch

    from spheroid_node.simulate.methods import METHODS, rounds_for, tokens_a_round
    from spheroid_node.simulate.regime import load_regime
    from spheroid_node.simulate.swarm import Swarm
    from spheroid_node.training.text import load_text

    torch.set_num_threads(1)
    text = load_text(
        arm.run.data, [str(text_folder / "train.txt")], [str(text_folder / "valid.txt")], arm.run.model.window
    )
    method, workers = METHODS[arm.method], arm.replicas * arm.run.model.blocks
    tokens = arm.tokens - arm.tokens % tokens_a_round(method, arm.run, workers)
    swarm = Swarm(
        method.scheduled(arm.run, workers),
        text,
        method.workers(workers),
        seed,
        load_regime(arm.regime),
        method,
        evaluation_windows=CURVE_WINDOWS,
        precision=arm.precision,
        compiled=True,
        attacks=dict.fromkeys(range(arm.hostile), arm.attack),
        overlap=arm.overlap,
    )
    return swarm, rounds_for(method, arm.run, workers, tokens)


def play_here(arm: Arm, seed: int, text_folder: Path) -> dict[str, Any]:
    """One arm and one seed, in this process."""
    from spheroid_node.training.diagnosis import diagnose
    from spheroid_node.training.text import held_out_windows

    swarm, rounds = prepared(arm, seed, text_folder)
    begun, curve, accepted, expected = time.monotonic(), [], 0, 0
    for report in swarm.play(rounds, evaluate_every=max(1, rounds // EVALUATIONS)):
        accepted, expected = accepted + report.accepted, expected + report.expected
        if report.ce:
            curve.append(
                {
                    "tokens": report.tokens,
                    "ce": report.ce,
                    "seconds": report.seconds,
                    "bytes": report.bytes_moved,
                }
            )
    model = swarm.model()
    found = diagnose(model, held_out_windows(swarm.text.held_out, WINDOWS, arm.run.model.window))
    return {
        "arm": arm.name,
        "seed": seed,
        "key": arm.key(seed),
        "ce": found.from_noise.ce_readout,
        "ce_by_block": found.from_noise.ce,
        "ce_mean_log_probs": found.from_noise.ce_mean_log_probs,
        "ce_last_two": found.ce_mean_last_two,
        "ce_alone": found.ce_alone,
        "ce_local": found.ce_local,
        "ce_local_posterior": found.ce_local_posterior,
        "ce_scrambled": found.ce_scrambled_readout,
        "tokens": report.tokens,
        "rounds": rounds,
        "participation": accepted / expected,
        "bytes_moved": report.bytes_moved,
        "bytes_a_worker": statistics.fmean(swarm.bytes_by_worker),
        "virtual_seconds": report.seconds,
        "wall_seconds": time.monotonic() - begun,
        "loss": report.loss,
        "digest": swarm.digest(),
        "curve": curve,
        "machine": machine(),
    }


def unpack(archive: Path, folder: Path) -> Path:
    """The folder with train.txt and valid.txt: ``archive`` itself, or unpacked into ``folder``."""
    if archive.is_dir():
        return archive
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.rglob("train.txt")).parent


def _path(table: str, arm: Arm, seed: int) -> Path:
    name = re.sub("[^a-z0-9.]+", "-", arm.name.lower()).strip("-")
    return RAW / table / f"{name}-{seed}.json"


def _kept(table: str, arm: Arm, seed: int) -> dict[str, Any] | None:
    path = _path(table, arm, seed)
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["key"] == arm.key(seed) else None


def _result(table: str, arm: Arm, seed: int) -> dict[str, Any]:
    result = _kept(table, arm, seed)
    if result is None:
        raise SystemExit(f"{table} {arm.name} seed {seed}: no result")
    return result


# --- telling --------------------------------------------------------------------------------------


def options(doc: str | None) -> argparse.Namespace:
    """The options that every table has."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(
        "--data", required=True, help="wikitext-2.tar.xz, or a folder with train.txt and valid.txt"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="arms played at a time, a core each")
    return parser.parse_args()


def spread(results: Sequence[Mapping[str, Any]], field: str = "ce") -> tuple[float, float]:
    """Mean and standard deviation over seeds; 0 for a single one."""
    values = [float(result[field]) for result in results]
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def row(name: str, results: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """What a table says of an arm."""
    mean, deviation = spread(results)
    by_block = [statistics.fmean(values) for values in zip(*(r["ce_by_block"] for r in results), strict=True)]
    return {
        "arm": name,
        "ce": round(mean, 4),
        "ce_sd": round(deviation, 4),
        "ce_by_block": [round(value, 4) for value in by_block],
        "ce_mean_log_probs": round(spread(results, "ce_mean_log_probs")[0], 4),
        "ce_last_two": round(spread(results, "ce_last_two")[0], 4),
        "seeds": len(results),
        "tokens": results[0]["tokens"],
        **more,
    }


def dots(path: Path, title: str, rows: Sequence[Mapping[str, Any]], reference: float | None = None) -> None:
    """A dot an arm with its standard deviation, in the order given; ``reference`` is the end-to-end model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.1 + 0.36 * len(rows)), layout="constrained")
    names, values = [r["arm"] for r in rows], [r["ce"] for r in rows]
    places = [*range(len(rows))]
    axes.errorbar(values, places, xerr=[r["ce_sd"] for r in rows], fmt="o", color="#4c78a8", capsize=3)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.3f}", (value, place), (0, 6), textcoords="offset points", ha="center")
    if reference is not None:
        axes.axvline(reference, color="#e45756", linestyle="--", label="full depth, end to end")
        axes.legend(loc="lower right")
    axes.set_yticks(places, names)
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("from-noise cross-entropy on held-out text, nats a byte")
    axes.set_title(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    seed, folder = fields.pop("seed"), Path(fields.pop("text"))
    fields["run"] = RunSpec.model_validate(fields["run"])
    played = play_here(Arm(**fields), seed, folder)
    partial = Path(sys.argv[2] + ".part")
    partial.write_text(json.dumps(played, indent=1) + "\n")
    partial.replace(sys.argv[2])
