from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from spheroid_node.errors import CheckpointInvalid, NoSuchBlock, RunMismatch
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten, joined
from spheroid_node.run import INTERFACE_GROUP, RunSpec, TrainingSpec
from spheroid_node.training.local import LocalTrainer, NonFiniteLoss, learning_rate
from spheroid_node.training.loss import Draw
from spheroid_node.training.text import Text, held_out_windows

MakeRun = Callable[..., RunSpec]
RECIPES = [
    {"denoiser": denoiser, "conditioning": conditioning}
    for denoiser in ("evidence", "edm")
    for conditioning in ("chain", "context")
]
GOLDEN = Path(__file__).parent / "golden_loss.json"


def parameters(trainer: LocalTrainer) -> dict[str, bytes]:
    return {
        "block": flatten(trainer.hop.block).tobytes(),
        "interface": flatten(trainer.hop.interface).tobytes(),
        **{str(hop.index): flatten(hop.block).tobytes() for hop in trainer.upstream},
    }


def poison(trainer: LocalTrainer) -> None:
    """Make every loss from now on NaN, without a NaN parameter."""
    trainer.hop.denoiser.loss = lambda logits, *_: logits.sum() * float("nan")  # type: ignore[method-assign]


def spoilt(
    losses: Callable[[Draw], tuple[torch.Tensor, ...]], good: Iterator[bool], draw: Draw
) -> tuple[torch.Tensor, ...]:
    factor = 1 if next(good, False) else math.nan
    return tuple(loss * factor for loss in losses(draw))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(recipe.values()))
@pytest.mark.parametrize("block", [0, 1])
def test_it_learns(make_run: MakeRun, text: Text, recipe: dict[str, str], block: int) -> None:
    trainer = LocalTrainer(make_run(**recipe), block, text)
    windows = held_out_windows(text.held_out, 16, 32)
    before = trainer.evaluate(windows)[-1]
    outcome = trainer.train(60)
    after = trainer.evaluate(windows)[-1]
    assert before == pytest.approx(math.log(256), abs=1e-3)
    assert after < 2.6
    assert outcome.steps == 60
    assert outcome.tokens == 60 * 8 * 32
    assert outcome.loss < before


def test_a_chained_block_uses_what_comes_from_upstream(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 1, text)
    trainer.train(30)
    windows = held_out_windows(text.held_out, 16, 32)
    used = trainer.evaluate(windows)[1]
    with torch.no_grad():
        trainer.upstream[0].block.layers[0].attention.qkv.weight.zero_()
        trainer.upstream[0].block.layers[0].mlp[2].weight.zero_()
    assert trainer.evaluate(windows)[1] != pytest.approx(used, abs=1e-3)


@pytest.mark.parametrize("block", [0, 1])
def test_a_chained_worker_evaluates_all_blocks_up_to_its_own(run: RunSpec, text: Text, block: int) -> None:
    windows = held_out_windows(text.held_out, 4, 32)
    assert len(LocalTrainer(run, block, text).evaluate(windows)) == block + 1


def test_a_context_worker_holds_and_evaluates_its_own_block_alone(make_run: MakeRun, text: Text) -> None:
    trainer = LocalTrainer(make_run(conditioning="context"), 1, text)
    assert len(trainer.evaluate(held_out_windows(text.held_out, 4, 32))) == 1
    with pytest.raises(ValueError, match="block-0"):
        trainer.load("block-0", 1, 0, initial_vector(trainer.run, "block-0"))


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_no_gradient_and_no_step_reaches_a_block_upstream(
    make_run: MakeRun, text: Text, denoiser: str
) -> None:
    trainer = LocalTrainer(make_run(denoiser=denoiser), 1, text)
    before = parameters(trainer)
    trainer.train(3)
    after = parameters(trainer)
    assert after["0"] == before["0"]
    assert not any(parameter.requires_grad for parameter in trainer.upstream[0].block.parameters())
    assert after["block"] != before["block"]
    assert after["interface"] != before["interface"]


def test_a_frozen_interface_stays(make_run: MakeRun, text: Text) -> None:
    trainer = LocalTrainer(make_run(interface="frozen"), 0, text)
    before = parameters(trainer)
    windows = held_out_windows(text.held_out, 16, 32)
    trainer.train(60)
    assert trainer.groups == ("block-0",)
    assert parameters(trainer)["interface"] == before["interface"]
    assert trainer.evaluate(windows)[0] < 3.0


def test_training_is_a_function_of_the_seed(run: RunSpec, text: Text) -> None:
    def losses(seed: int) -> list[float]:
        trainer = LocalTrainer(run, 1, text, worker_seed=seed)
        return [trainer.step() for _ in range(5)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_blocks_of_one_seed_draw_different_windows(run: RunSpec, text: Text) -> None:
    draws = [LocalTrainer(run, block, text)._draw().windows_BT for block in (0, 1)]
    assert not torch.equal(*draws)


def test_held_out_text_is_never_trained_on(run: RunSpec) -> None:
    marked = Text("marked", np.full(600, 97, dtype=np.uint8), np.full(100, 98, dtype=np.uint8), "")
    trainer = LocalTrainer(run, 0, marked)
    for _ in range(20):
        assert (trainer._draw().windows_BT == 97).all()
        trainer.drawn += 1


def test_sigma_is_drawn_from_the_interval_of_the_own_block(run: RunSpec, text: Text) -> None:
    for block in (0, 1):
        trainer = LocalTrainer(run, block, text)
        low, high = trainer.hop.schedule.training_interval(block)
        sigma_B = trainer._draw().own.sigma_B
        assert ((sigma_B >= low - 1e-4) & (sigma_B <= high + 1e-4)).all()


def test_a_loss_that_is_not_finite_touches_nothing(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 1, text)
    trainer.train(2)
    before = parameters(trainer)
    poison(trainer)
    with pytest.raises(NonFiniteLoss) as caught:
        trainer.step()
    assert parameters(trainer) == before
    assert caught.value.seed == (0, 1, 2)
    assert len(caught.value.sigma) == run.training.batch


def test_a_gradient_that_is_not_finite_touches_nothing(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    trainer.train(2)
    before = parameters(trainer)
    trainer.hop.interface.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteLoss):
        trainer.step()
    assert parameters(trainer) == before


def test_training_goes_on_after_a_skipped_step(
    run: RunSpec, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = LocalTrainer(run, 0, text)
    good = iter(call not in (1, 2, 4, 5) for call in range(100))
    monkeypatch.setattr(trainer, "_losses", partial(spoilt, trainer._losses, good))
    assert trainer.train(4).steps == 4
    assert trainer.drawn == 8


def test_a_round_that_cannot_begin_says_so(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    poison(trainer)
    with pytest.raises(NonFiniteLoss):
        trainer.train(10)
    assert trainer.drawn == 3


def test_a_round_that_breaks_down_keeps_what_it_learnt(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    trainer.train(1)
    trainer._losses = partial(spoilt, trainer._losses, iter([True, True]))  # type: ignore[method-assign]
    outcome = trainer.train(10)
    assert outcome.steps == 2
    assert math.isfinite(outcome.loss)


def test_training_stops_when_told(run: RunSpec, text: Text) -> None:
    answers = iter([False, False, True])
    assert LocalTrainer(run, 0, text).train(10, lambda: next(answers)).steps == 2
    nothing = LocalTrainer(run, 0, text).train(10, lambda: True)
    assert (nothing.steps, nothing.tokens) == (0, 0)
    assert math.isnan(nothing.loss)


@pytest.mark.parametrize("group", ["block-1", INTERFACE_GROUP])
def test_version_plus_update_is_the_trained_block(run: RunSpec, text: Text, group: str) -> None:
    trainer = LocalTrainer(run, 1, text)
    base = initial_vector(run, group) + np.float32(0.01)
    trainer.load(group, 3, 30, base)
    assert not trainer.update(group).any()
    trainer.train(3)
    update = trainer.update(group)
    assert update.dtype == np.float32
    assert np.abs(update).max() > 1e-4

    other = LocalTrainer(run, 1, text)
    other.load(group, 4, 33, base + update)
    part = "interface" if group == INTERFACE_GROUP else "block"
    trained = np.frombuffer(parameters(trainer)[part], dtype=np.float32)
    loaded = np.frombuffer(parameters(other)[part], dtype=np.float32)
    np.testing.assert_allclose(loaded, trained, atol=1e-6)


@pytest.mark.parametrize("group", ["block-1", INTERFACE_GROUP])
def test_what_is_learnt_while_an_update_travels_goes_on_top_of_the_new_version(
    run: RunSpec, text: Text, group: str
) -> None:
    trainer = LocalTrainer(run, 1, text)
    trainer.train(3)
    submitted = trainer.take(group)
    assert not trainer.update(group).any()
    trainer.train(2)
    ahead = trainer.update(group)
    assert ahead.any() and submitted.any()
    version, left_over = initial_vector(run, group) + np.float32(0.5), np.full_like(ahead, 0.25)
    trainer.load(group, 1, 30, version, left_over, carry=True)
    now = flatten(trainer.hop.interface if group == INTERFACE_GROUP else trainer.hop.block)
    np.testing.assert_array_equal(now, version + left_over + ahead)
    # The next update has it once, and what is left over is added to it by the contributor.
    np.testing.assert_allclose(trainer.take(group), ahead, atol=1e-6)
    trainer.load(group, 2, 40, version)
    assert not trainer.update(group).any(), "nothing is carried unless it is asked for"


def test_the_learning_rate_goes_by_the_steps_that_the_version_does_not_hold(
    run: RunSpec, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def note(training: TrainingSpec, step: int) -> float:
        asked.append(step)
        return 1e-3

    monkeypatch.setattr("spheroid_node.training.local.learning_rate", note)
    trainer = LocalTrainer(run.model_copy(update={"interface": "frozen"}), 0, text)
    trainer.train(3)
    trainer.take("block-0")
    trainer.train(2)
    trainer.load("block-0", 1, 30, initial_vector(run, "block-0"), carry=True)
    trainer.train(1)
    assert sorted(set(asked)) == [0, 1, 2, 3, 4, 32]


def test_what_is_not_finite_is_not_carried_on(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    with torch.no_grad():
        next(trainer.hop.block.parameters()).fill_(math.nan)
    vector = initial_vector(run, "block-0")
    trainer.load("block-0", 1, 1, vector, carry=True)
    np.testing.assert_array_equal(flatten(trainer.hop.block), vector)


def test_an_update_is_tried_on_the_version_and_leaves_no_trace(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 1, text)
    windows = held_out_windows(text.held_out, 4, run.model.window)
    trainer.train(10)
    for group in trainer.groups:  # at version 0 the head is zero, and no block says anything
        trainer.load(group, 1, 10, initial_vector(run, group) + trainer.update(group))
    trainer.train(20)
    learnt, before = {group: trainer.take(group) for group in trainer.groups}, parameters(trainer)
    assert trainer.is_at("block-1", 1)
    assert not trainer.is_at("block-1", 0) and not trainer.is_at("block-0", 0)
    versions = trainer.evaluate_versions(windows)[-1]
    for group, update in learnt.items():
        tried, against = (trainer.screen(group, sign * update, windows) for sign in (1, -1))
        # Block and interface were trained together, so that one alone can be worse than neither.
        assert tried is not None and against is not None and tried < against and against > 0.1
    assert parameters(trainer) == before
    huge = np.full_like(learnt["block-1"], 1e38)
    ruined = trainer.screen("block-1", huge, windows)
    assert ruined is not None and not ruined <= 1e6
    trainer.load("block-1", 2, 1, np.frombuffer(before["block"], np.float32))
    again = trainer.screen("block-1", np.zeros_like(huge), windows)
    assert again == pytest.approx(0.0)
    assert trainer.evaluate_versions(windows)[-1] != versions, "it goes by what is loaded now"
    trainer.load("block-1", 3, 1, huge)
    assert trainer.screen("block-1", learnt["block-1"], windows) is None, "it is ruined already"


def test_load_refuses_what_does_not_fit(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    before = parameters(trainer)
    with pytest.raises(ValueError, match="shape"):
        trainer.load("block-0", 1, 1, np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="block-1"):
        trainer.load("block-1", 1, 1, initial_vector(run, "block-1"))
    assert parameters(trainer) == before
    with pytest.raises(NoSuchBlock):
        LocalTrainer(run, 7, text)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(recipe.values()))
def test_resuming_repeats_what_would_have_been(
    make_run: MakeRun, text: Text, tmp_path: Path, recipe: dict[str, str]
) -> None:
    run = make_run(**recipe)
    groups = [*run.worker_groups(1), *(["block-0"] if recipe["conditioning"] == "chain" else [])]

    def next_round(trainer: LocalTrainer, vectors: dict[str, np.ndarray]) -> list[float]:
        for group in groups:
            trainer.load(group, 1, 4, vectors[group])
        return [trainer.step() for _ in range(4)]

    trainer = LocalTrainer(run, 1, text, worker_seed=5)
    trainer.train(4)
    vectors = {group: initial_vector(run, group) for group in groups}
    for group in run.worker_groups(1):
        vectors[group] = vectors[group] + trainer.update(group)
    trainer.save(tmp_path / "state.safetensors")
    uninterrupted = next_round(trainer, vectors)

    resumed = LocalTrainer(run, 1, text, worker_seed=5)
    resumed.restore(tmp_path / "state.safetensors")
    assert next_round(resumed, vectors) == uninterrupted

    forgetful = LocalTrainer(run, 1, text, worker_seed=5)
    assert next_round(forgetful, vectors) != uninterrupted


def test_a_state_saved_before_the_first_step_can_be_restored(
    run: RunSpec, text: Text, tmp_path: Path
) -> None:
    LocalTrainer(run, 0, text).save(tmp_path / "state")
    trainer = LocalTrainer(run, 0, text)
    trainer.restore(tmp_path / "state")
    trainer.train(1)


def test_restore_refuses_a_damaged_or_foreign_state(
    make_run: MakeRun, run: RunSpec, text: Text, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    trainer = LocalTrainer(run, 0, text)
    trainer.train(1)
    trainer.save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:4], b"", whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointInvalid):
            trainer.restore(path)
    path.write_bytes(whole)
    with pytest.raises(CheckpointInvalid, match="block 0"):
        LocalTrainer(run, 1, text).restore(path)
    with pytest.raises(RunMismatch):
        LocalTrainer(make_run(training={"batch": 4}), 0, text).restore(path)
    trainer.restore(path)


def test_weight_decay_is_for_matrices_of_the_block_alone(make_run: MakeRun, text: Text) -> None:
    trainer = LocalTrainer(make_run(denoiser="edm", training={"weight_decay": 0.3}), 1, text)
    decayed = {
        id(parameter): settings["weight_decay"]
        for settings in trainer._optimiser.param_groups
        for parameter in settings["params"]
    }
    for name, parameter in trainer._named_parameters().items():
        expected = 0.3 if name.startswith("block-1.") and parameter.ndim >= 2 else 0.0
        assert decayed[id(parameter)] == expected, name


def test_learning_rate_goes_by_the_steps_of_the_group(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    trainer.load("block-0", 1, 1, initial_vector(run, "block-0"))
    trainer.load(INTERFACE_GROUP, 1, 3, initial_vector(run, INTERFACE_GROUP))
    trainer.step()
    rates = {settings["group"]: settings["lr"] for settings in trainer._optimiser.param_groups}
    assert rates == {"block-0": pytest.approx(1e-2 * 2 / 5), INTERFACE_GROUP: pytest.approx(1e-2 * 4 / 5)}
    trainer.step()
    assert trainer._optimiser.param_groups[0]["lr"] == pytest.approx(1e-2 * 3 / 5)


def test_learning_rate_schedule() -> None:
    constant = TrainingSpec(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(constant, step) for step in (0, 1, 3, 4, 9999)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = TrainingSpec(learning_rate=1.0, warmup_steps=4, decay_steps=10)
    assert learning_rate(cosine, 4) == 1.0
    assert learning_rate(cosine, 9) == pytest.approx(0.55)
    assert learning_rate(cosine, 14) == learning_rate(cosine, 10**6) == pytest.approx(0.1)


def test_in_bfloat16_it_learns_as_well(
    monkeypatch: pytest.MonkeyPatch, make_run: MakeRun, text: Text
) -> None:
    # Any processor can emulate it, slowly.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    run = make_run(blocks=3)
    exact, mixed = LocalTrainer(run, 1, text), LocalTrainer(run, 1, text, precision="bf16")
    assert (exact.mixed, mixed.mixed) == (False, True)
    windows = held_out_windows(text.held_out, 16, 32)
    for trainer in (exact, mixed):
        trainer.train(60)
        assert all(p.dtype == torch.float32 for p in trainer.hop.parameters())
    assert mixed.evaluate(windows)[-1] == pytest.approx(exact.evaluate(windows)[-1], abs=0.05)
    assert parameters(mixed) != parameters(exact)


def test_without_a_compiler_it_trains_all_the_same(
    monkeypatch: pytest.MonkeyPatch, run: RunSpec, text: Text
) -> None:
    def compile(*_: object, **__: object) -> Callable[..., object]:
        def fail(*_: object) -> object:
            raise RuntimeError("no C++ compiler")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    trainer, plain = LocalTrainer(run, 1, text, compiled=True), LocalTrainer(run, 1, text)
    trainer.warm_up()
    assert [trainer.step() for _ in range(3)] == [plain.step() for _ in range(3)]


def test_warming_up_changes_nothing(monkeypatch: pytest.MonkeyPatch, run: RunSpec, text: Text) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    warm, cold = LocalTrainer(run, 1, text, compiled=True), LocalTrainer(run, 1, text)
    warm.warm_up()
    assert [warm.step() for _ in range(3)] == [cold.step() for _ in range(3)]


def test_moments_can_be_forgotten(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    trainer.train(5)
    trainer.reset_moments()
    assert not trainer._optimiser.state
    trainer.step()
    assert {float(state["step"]) for state in trainer._optimiser.state.values()} == {1.0}


def golden_losses(run: RunSpec, text: Text) -> list[float]:
    trainer = LocalTrainer(run, 1, text, worker_seed=1)
    return [round(trainer.step(), 5) for _ in range(50)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(recipe.values()))
def test_the_loss_curve_is_the_golden_one(make_run: MakeRun, text: Text, recipe: dict[str, str]) -> None:
    """After a change that is meant to move it: delete a curve from golden_loss.json to have it rewritten."""
    golden = json.loads(GOLDEN.read_text())
    name = "-".join(recipe.values())
    losses = golden_losses(make_run(**recipe), text)
    if name not in golden:
        golden[name] = losses
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        pytest.fail(f"wrote the curve {name}; run again")
    np.testing.assert_allclose(losses, golden[name], atol=1e-3)


def test_looking_ahead_has_a_golden_curve_too(make_run: MakeRun, text: Text) -> None:
    """Of block 1 of 3: the last block of the runs above has nothing ahead."""
    golden = json.loads(GOLDEN.read_text())
    losses = golden_losses(make_run(blocks=3, lookahead=1.0), text)
    if "lookahead" not in golden:
        GOLDEN.write_text(json.dumps({**golden, "lookahead": losses}, indent=1) + "\n")
        pytest.fail("wrote the curve lookahead; run again")
    np.testing.assert_allclose(losses, golden["lookahead"], atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(recipe.values()))
def test_in_shards_it_learns_the_same(make_run: MakeRun, text: Text, recipe: dict[str, str]) -> None:
    whole = make_run(**recipe)
    cut = whole.model_copy(update={"round": whole.round.model_copy(update={"shards": 3})})
    trainers = [LocalTrainer(run, 1, text, worker_seed=5) for run in (whole, cut)]
    for trainer in trainers:
        for group in (*trainer.groups, *trainer.run.copied_groups(1)):
            vector = initial_vector(trainer.run, group)
            trainer.load(group, 1, 7, vector + np.float32(0.125))
        trainer.train(5)
    learnt = {group: trainers[1].update(group) for group in trainers[1].groups}
    assert list(learnt) == [f"{name}.{number}" for name in whole.groups[1:] for number in range(3)]
    for name, vector in joined(cut, learnt).items():
        np.testing.assert_array_equal(vector, trainers[0].update(name))
    assert parameters(trainers[0]) == parameters(trainers[1])
    with pytest.raises(ValueError, match=r"block-1\.3"):
        trainers[1].load("block-1.3", 1, 1, vector)


def test_the_rate_follows_the_shard_that_has_most_steps(make_run: MakeRun, text: Text) -> None:
    run = make_run(training={"warmup_steps": 100})
    run = run.model_copy(update={"round": run.round.model_copy(update={"shards": 2})})
    trainer = LocalTrainer(run, 0, text)
    for group, steps in (("block-0.0", 20), ("block-0.1", 35), ("interface.0", 5), ("interface.1", 0)):
        trainer.load(group, 1, steps, initial_vector(run, group))
    trainer.step()
    rates = {settings["group"]: settings["lr"] for settings in trainer._optimiser.param_groups}
    assert rates == {
        "block-0": learning_rate(run.training, 35),
        "interface": learning_rate(run.training, 5),
    }
