"""Plans against what is measured: the allocations of a real training step, recorded by PyTorch's profiler."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from spheroid_node.errors import NoSuchBlock
from spheroid_node.model.composed import ComposedModel
from spheroid_node.run import LearningSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.training import plan as planning
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.plan import (
    CARD_OVERHEAD,
    GIB,
    Needs,
    end_to_end,
    fits,
    full_replica,
    plan,
    total_elements,
    traffic,
)
from spheroid_node.training.text import Text
from spheroid_node.wire.tensors import encode_vector

TOLERANCE = 0.05
"""Half of what is promised. Today 0.02 %; 2.5 % where a kernel's own copy is the worst moment (``edm``)."""


def make(
    width: int = 64,
    layers: int = 1,
    blocks: int = 3,
    window: int = 32,
    batch: int = 4,
    interface: str = "shared",
    mixer: str = "attention",
    compression: str = "fp16",
    mask_suffix: float = 0.0,
    **learning: object,
) -> RunSpec:
    model = {"blocks": blocks, "layers": layers, "width": width, "heads": 4, "window": window, "mixer": mixer}
    return RunSpec(
        name="planned",
        model=ModelSpec.model_validate(model),
        learning=LearningSpec.model_validate(learning),
        training=TrainingSpec(batch=batch, mask_suffix=mask_suffix),
        round=RoundSpec.model_validate({"compression": compression}),
        interface="frozen" if interface == "frozen" else "shared",
    )


def peak_of_training(run: RunSpec, block: int, text: Text, precision: str) -> tuple[int, int]:
    """Most bytes of tensors alive from the trainer's making to its second step; and of the loaded version."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = LocalTrainer(run, block, text, precision=precision)
        trainer.train(2)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(alive.max()), sum(trainer.update(group).nbytes for group in trainer.groups)


CASES = {
    "block 0": (make(256, layers=2, window=128, batch=8), 0, "float32"),
    "two upstream": (make(256, layers=2, window=128, batch=8), 2, "float32"),
    "context": (make(192, layers=3, window=64, batch=2, conditioning="context"), 1, "float32"),
    "parameters outweigh activations": (make(384, layers=2, window=16, batch=1), 2, "float32"),
    "edm, frozen interface": (make(192, window=64, interface="frozen", denoiser="edm"), 2, "float32"),
    "edm, mean": (make(128, window=64, denoiser="edm", readout="mean"), 1, "float32"),
    "looks ahead": (make(192, layers=2, window=64, lookahead=0.5), 1, "float32"),
    "looks ahead from block 0": (make(192, layers=2, window=64, lookahead=0.5), 0, "float32"),
    "deeper than is run": (make(48, layers=11), 1, "float32"),
    "mlp": (make(128, layers=2, window=64, batch=8, mixer="mlp"), 1, "float32"),
    "masked": (make(64, window=64, batch=8, mask_suffix=0.5, lookahead=0.5), 1, "float32"),
    "bfloat16": (make(192, layers=2, window=64, batch=8), 1, "bf16"),
    "bfloat16, looks ahead": (make(192, window=64, batch=8, lookahead=0.5), 1, "bf16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_step_needs_what_was_planned(
    case: str, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU without arithmetic for bfloat16 emulates it: slow, but with the same tensors.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    run, block, precision = CASES[case]
    needs = plan(run, block, "cpu", mixed=precision == "bf16")
    peak, version = peak_of_training(run, block, text, precision)
    assert needs.version == version
    assert needs.total - needs.version == pytest.approx(peak, rel=TOLERANCE)


def test_the_parts_of_a_plan_are_those_of_the_trainer(text: Text) -> None:
    run = make(lookahead=0.1)
    for block in range(3):
        trainer, needs = LocalTrainer(run, block, text), plan(run, block, "cpu")
        trained = sum(len(trainer.update(group)) for group in trainer.groups)
        assert needs.parameters == needs.gradients == needs.version == 4 * trained
        assert needs.optimiser == 8 * trained
        assert needs.adamw == 16 * trained
        copied = sum(planning.group_elements(run, group) for group in run.copied_groups(block))
        assert needs.upstream == trainer.copied_bytes == pytest.approx(2 * copied, rel=0.01)


def test_a_frozen_interface_has_neither_gradient_nor_moments() -> None:
    shared, frozen = plan(make(), 0), plan(make(interface="frozen"), 0)
    interface = planning.group_elements(make(), "interface")
    assert frozen.parameters == shared.parameters
    assert shared.gradients - frozen.gradients == 4 * interface
    assert shared.optimiser - frozen.optimiser == 8 * interface


def test_a_gpu_keeps_activations_in_bfloat16_and_the_version_elsewhere() -> None:
    run = make(256, layers=2, window=128, batch=8)
    gpu, cpu, emulated = plan(run, 0, "cuda"), plan(run, 0, "cpu"), plan(run, 0, "cpu", mixed=True)
    assert gpu.version == 0 < cpu.version
    assert 0.5 < gpu.activations / cpu.activations < 0.8
    assert gpu.activations < emulated.activations  # a CPU attends in float32
    assert plan(run, 0, "cuda", mixed=False).activations == cpu.activations


def test_parameters_of_the_model_are_those_of_its_modules() -> None:
    for run in (make(), make(blocks=1), make(conditioning="context"), make(denoiser="edm", mixer="mlp")):
        assert total_elements(run) == sum(p.numel() for p in ComposedModel(run).parameters())


def test_a_full_replica_is_the_whole_depth_in_one_block() -> None:
    run = make(128, layers=2, batch=32)
    whole = end_to_end(run)
    model = ComposedModel(whole)
    assert (whole.model.blocks, whole.model.layers) == (1, 6)
    assert full_replica(run).adamw == 16 * sum(p.numel() for p in model.parameters())
    assert full_replica(run).upstream == 0
    assert full_replica(run).activations > 2 * plan(run, 0).activations


@pytest.mark.parametrize("compression", ["fp16", "int8", "float32"])
def test_traffic_is_what_encoding_makes(compression: str) -> None:
    run = make(compression=compression, lookahead=0.5)
    vectors = {group: np.zeros(planning.group_elements(run, group), np.float32) for group in run.groups}
    for block in range(3):
        moved = traffic(run, block)
        updates = (encode_vector(vectors[group], compression) for group in run.worker_groups(block))
        fetched = (*run.worker_groups(block), *run.copied_groups(block))
        assert moved.update == sum(map(len, updates))
        assert moved.versions == sum(vectors[group].nbytes for group in fetched)
        assert traffic(make(lookahead=0.5), block, compression) == moved


def test_momentum_travels_with_a_version() -> None:
    run = make(lookahead=0.5)
    outer = run.training.model_copy(update={"outer": "nesterov"})
    heavy = run.model_copy(update={"training": outer})
    for block in range(3):
        assert traffic(heavy, block).update == traffic(run, block).update
        assert traffic(heavy, block).versions == 2 * traffic(run, block).versions


def test_shards_move_and_hold_what_their_whole_does() -> None:
    run = make(lookahead=0.5)
    cut = run.model_copy(update={"round": run.round.model_copy(update={"shards": 7})})
    for block in range(3):
        assert plan(cut, block) == plan(run, block)
        assert traffic(cut, block) == traffic(run, block)
    assert total_elements(cut) == total_elements(run)


def test_a_card_must_also_hold_what_is_no_tensor() -> None:
    needs = Needs(
        parameters=GIB, gradients=GIB, optimiser=2 * GIB, upstream=1, activations=GIB - 1, version=0
    )
    assert needs.total == 5 * GIB
    assert fits(needs, 5 + CARD_OVERHEAD / GIB)
    assert not fits(needs, 4.9 + CARD_OVERHEAD / GIB)


def test_a_block_of_any_size_is_planned_at_once() -> None:
    run = make(9216, layers=3, blocks=24, window=1024, batch=16)
    assert total_elements(run) == pytest.approx(75.8e9, rel=0.01)
    first, last = plan(run, 0), plan(run, 23)
    assert last.upstream == pytest.approx(23 * 2 * total_elements(run) / 24, rel=0.01)
    assert 70 * GIB > first.total > first.adamw > 45 * GIB


def test_no_such_block() -> None:
    for function in (plan, traffic):
        with pytest.raises(NoSuchBlock):
            function(make(), 3)
