from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spheroid_node.model.initial import initial_vector
from spheroid_node.model.randomness import stream
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.methods import (
    BLOCKTRAIN,
    METHODS,
    Method,
    common_tokens,
    rounds_for,
    tokens_a_round,
)
from spheroid_node.simulate.swarm import Swarm
from spheroid_node.training.local import LocalTrainer, learning_rate
from spheroid_node.training.text import Text
from spheroid_node.wire.tensors import Vector

WORKERS = 4
SEED = 3
AVERAGING = ["fedavg", "local-sgd", "diloco"]


def tiny_run(**changes: Any) -> RunSpec:
    """Two blocks of one layer; slots so long that everyone makes all steps."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": ModelSpec(blocks=2, layers=1, width=16, heads=2, window=16),
        "training": TrainingSpec(local_steps=16, batch=4, warmup_steps=3, learning_rate=1e-2),
        "round": RoundSpec(genesis=1000.0, period=60.0, settle=10.0),
    }
    return RunSpec(**(fields | changes))


@pytest.fixture(scope="module")
def text() -> Text:
    words = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
    return Text("foxes", words[:2000], words[2000:], "")


def swarm_of(method: Method, text: Text, run: RunSpec | None = None, workers: int = WORKERS) -> Swarm:
    played = method.run_of(run or tiny_run())
    return Swarm(played, text, method.workers(workers), seed=SEED, method=method)


# --- what is played ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks", "layers", "steps", "period"),
    [
        ("blocktrain", 3, 2, 80, 30.0),
        ("end-to-end", 1, 6, 80, 90.0),
        ("one-block", 1, 2, 80, 30.0),
        ("fedavg", 1, 6, 80, 90.0),
        ("local-sgd", 1, 6, 10, 90.0 / 8),
        ("diloco", 1, 6, 80, 90.0),
    ],
)
def test_each_method_plays_a_run_of_its_shape(
    name: str, blocks: int, layers: int, steps: int, period: float
) -> None:
    run = tiny_run(
        model=ModelSpec(blocks=3, layers=2, width=16, heads=2, window=16),
        training=TrainingSpec(local_steps=80),
        round=RoundSpec(period=30.0, settle=6.0),
    )
    played = METHODS[name].run_of(run)
    assert (played.model.blocks, played.model.layers) == (blocks, layers)
    outer = "nesterov" if name == "diloco" else "average"
    assert played.training == run.training.model_copy(update={"local_steps": steps, "outer": outer})
    assert played.round.period == pytest.approx(period)
    assert played.round.settle == pytest.approx(period / 5)
    assert played.seed == run.seed
    if name != "blocktrain":
        assert played.learning.denoiser == "plain"
        assert played.round.aggregation == "mean"
        assert RunSpec.unpack(played.pack()) == played


def test_blocktrain_is_the_run_itself() -> None:
    assert BLOCKTRAIN.run_of(tiny_run()) == tiny_run()
    assert next(iter(METHODS)) == BLOCKTRAIN.name


@pytest.mark.parametrize(("steps", "expected"), [(1, 1), (7, 1), (8, 1), (20, 2), (500, 50), (1000, 125)])
def test_local_sgd_has_a_divisor_of_the_steps_of_a_round(steps: int, expected: int) -> None:
    run = tiny_run(training=TrainingSpec(local_steps=steps))
    assert METHODS["local-sgd"].run_of(run).training.local_steps == expected


def test_one_worker_trains_alone_and_the_others_use_all() -> None:
    assert {name: method.workers(6) for name, method in METHODS.items()} == {
        "blocktrain": 6, "end-to-end": 1, "one-block": 1, "fedavg": 6, "local-sgd": 6, "diloco": 6,
    }  # fmt: skip


# --- same tokens, same arithmetic, same time --------------------------------------------------------


def test_the_same_tokens_are_the_same_arithmetic_and_time() -> None:
    run, workers = tiny_run(), 6
    tokens = common_tokens(run, workers, 50_000)
    layer_tokens, seconds = {}, {}
    for name, method in METHODS.items():
        played, rounds = method.run_of(run), rounds_for(method, run, workers, tokens)
        training = played.training
        by_worker = rounds * training.local_steps * training.batch * played.model.window
        layer_tokens[name] = method.workers(workers) * by_worker * played.model.layers
        seconds[name] = rounds * played.round.period
    one_block = layer_tokens.pop("one-block")
    assert set(layer_tokens.values()) == {tokens * 2}
    assert one_block == tokens
    for name in AVERAGING:
        assert seconds[name] == pytest.approx(seconds["blocktrain"])
    # One machine does what six did.
    assert seconds["end-to-end"] == pytest.approx(6 * seconds["blocktrain"])


def test_common_tokens_are_near_and_whole_rounds_of_all_methods() -> None:
    run = tiny_run()
    assert tokens_a_round(METHODS["fedavg"], run, WORKERS) == 4096
    assert common_tokens(run, WORKERS, 50_000) == 12 * 4096
    assert common_tokens(run, WORKERS, 1) == 4096
    for method in METHODS.values():
        assert rounds_for(method, run, WORKERS, 4096) * tokens_a_round(method, run, WORKERS) == 4096


def test_other_numbers_of_tokens_and_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fedavg.*4096 with 4 workers"):
        rounds_for(METHODS["fedavg"], tiny_run(), WORKERS, 2048)
    with pytest.raises(ValueError, match="no whole number"):
        rounds_for(BLOCKTRAIN, tiny_run(), WORKERS, 0)
    with pytest.raises(ValueError, match="3 workers on 2 blocks"):
        rounds_for(BLOCKTRAIN, tiny_run(), 3, 4096)


def test_a_schedule_spans_the_same_tokens_with_each_method() -> None:
    run, workers = tiny_run(training=TrainingSpec(warmup_steps=1200, decay_steps=24_000)), 6
    batch = run.training.batch * run.model.window
    for method in METHODS.values():
        played, replicas = method.scheduled(run, workers), method.replicas(run, workers)
        for share in (0.01, 0.2, 0.5, 1.0):
            tokens = share * 25_200 * batch * 3  # three replicas of each block
            step = round(tokens / (replicas * batch))
            expected = learning_rate(run.training, round(share * 25_200))
            assert learning_rate(played.training, step) == pytest.approx(expected, rel=0.02)
    assert METHODS["fedavg"].scheduled(run, workers).training.decay_steps == 12_000
    assert BLOCKTRAIN.scheduled(run, workers) == run
    constant = tiny_run(training=TrainingSpec(warmup_steps=0))
    assert METHODS["diloco"].scheduled(constant, workers) == METHODS["diloco"].run_of(constant)


# --- played -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_it_learns_on_just_so_many_tokens_and_again_the_same(method: Method, text: Text) -> None:
    tokens = 2 * 4096
    swarm, again = swarm_of(method, text), swarm_of(method, text)
    rounds = rounds_for(method, tiny_run(), WORKERS, tokens)
    reports = list(swarm.play(rounds, evaluate_every=rounds))
    list(again.play(rounds, evaluate_every=rounds))
    assert set(swarm.tokens) == {tokens}
    assert [report.participation for report in reports] == [1.0] * rounds
    assert reports[-1].ce[-1] < 3.2 < np.log(256)
    assert swarm.digest() == again.digest()
    assert (reports[-1].bytes_moved == 0) == method.alone


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_each_method_masks_what_the_run_masks(method: Method, text: Text) -> None:
    training = TrainingSpec(local_steps=8, batch=4, mask_suffix=0.5)
    digests = set()
    for run in (
        tiny_run(training=training),
        tiny_run(training=training.model_copy(update={"mask_suffix": 0.0})),
    ):
        swarm = swarm_of(method, text, run)
        list(swarm.play(2))
        for worker in swarm.workers:
            assert isinstance(worker.learner, LocalTrainer)
            assert (worker.learner._draw().masked_BT is None) == (run.training.mask_suffix == 0)
        digests.add(swarm.digest())
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["end-to-end", "one-block"])
def test_a_worker_alone_is_a_bare_trainer(name: str, text: Text) -> None:
    swarm = swarm_of(METHODS[name], text)
    list(swarm.play(3, evaluate_every=3))
    trainer = LocalTrainer(swarm.run, 0, text, "cpu", draws_of(0))
    vectors = {group: initial_vector(swarm.run, group) for group in swarm.run.groups}
    for group, vector in vectors.items():
        trainer.load(group, 0, 0, vector)
    trainer.train(3 * 16)
    for group, vector in vectors.items():
        learnt = swarm.versions[group].vector - vector
        assert np.abs(learnt).max() > 0.01
        np.testing.assert_allclose(learnt, trainer.update(group), atol=2e-5)


@pytest.mark.parametrize("name", AVERAGING)
def test_averaging_does_what_its_paper_says(name: str, text: Text) -> None:
    """Against loops written out here: trainers, numpy's mean, torch.optim.SGD as DiLoCo's outer optimiser."""
    run = tiny_run(round=RoundSpec(genesis=1000.0, period=60.0, settle=10.0, compression="float32"))
    swarm, rounds = swarm_of(METHODS[name], text, run, workers=2), 3
    list(swarm.play(rounds, evaluate_every=rounds))
    expected = averaged(swarm.run, text, 2, rounds, fresh=name == "fedavg", outer=name == "diloco")
    for group, vector in expected.items():
        moved = vector - initial_vector(swarm.run, group)
        assert np.abs(moved).max() > 0.01
        np.testing.assert_allclose(swarm.versions[group].vector, vector, atol=2e-5)


def averaged(
    run: RunSpec, text: Text, workers: int, rounds: int, fresh: bool, outer: bool
) -> dict[str, Vector]:
    versions = {group: initial_vector(run, group) for group in run.groups}
    outside = {group: torch.nn.Parameter(torch.from_numpy(vector)) for group, vector in versions.items()}
    optimiser = torch.optim.SGD(outside.values(), lr=0.7, momentum=0.9, nesterov=True)
    trainers = [LocalTrainer(run, 0, text, "cpu", draws_of(worker)) for worker in range(workers)]
    for round in range(rounds):
        for worker, trainer in enumerate(trainers):
            if fresh:
                trainers[worker] = LocalTrainer(run, 0, text, "cpu", draws_of(worker))
                trainers[worker].drawn = trainer.drawn
            for group, vector in versions.items():
                trainers[worker].load(group, round, round * run.training.local_steps, vector)
            trainers[worker].train(run.training.local_steps)
        for group in versions:
            mean = np.mean([trainer.update(group) for trainer in trainers], axis=0)
            if outer:
                outside[group].grad = -torch.from_numpy(mean)
            else:
                versions[group] = versions[group] + mean
        if outer:
            optimiser.step()
            versions = {group: vector.detach().numpy().copy() for group, vector in outside.items()}
    return versions


def draws_of(worker: int) -> int:
    """Seed of a worker's draws in a swarm of seed SEED."""
    return int(stream(SEED, 2, worker).integers(2**63))
