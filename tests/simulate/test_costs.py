from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spheroid_node.model.initial import initial_vector
from spheroid_node.rounds.outer import payload_elements
from spheroid_node.run import LearningSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.costs import cost_of, own_flops, upstream_flops
from spheroid_node.simulate.methods import BLOCKTRAIN, METHODS
from spheroid_node.simulate.swarm import Swarm
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.text import Text
from spheroid_node.wire.tensors import encoded_size

WORKERS = 6


def small_run(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "name": "small",
        "model": ModelSpec(blocks=3, layers=2, width=16, heads=2, window=8),
        "learning": LearningSpec(lookahead=0.0),
        "training": TrainingSpec(local_steps=8, batch=2),
        "round": RoundSpec(genesis=1000.0, period=60.0, settle=10.0),
    }
    return RunSpec(**(fields | changes))


@pytest.fixture(scope="module")
def text() -> Text:
    words = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 10, dtype=np.uint8)
    return Text("foxes", words[:300], words[300:], "")


def sizes(run: RunSpec) -> dict[str, int]:
    return {group: len(initial_vector(run, group)) for group in run.groups}


def test_arithmetic_by_hand() -> None:
    cost = cost_of(small_run(), METHODS["end-to-end"]).worst
    layers, width, window, vocabulary = 6, 16, 8, 256
    # A layer: queries, keys, values and output (4·width²), an MLP of ratio 4 (8·width²), scores and values.
    multiplied = layers * (12 * width**2 + 2 * window * width) + vocabulary * width
    assert cost.forward_flops == 2 * multiplied
    # The gradients of a product's two factors are a product each.
    assert cost.backward_flops == 2 * cost.forward_flops
    assert cost.upstream_flops == 0


@pytest.mark.parametrize(
    ("learning", "mixer", "interface", "block"),
    [
        ({"lookahead": 0.0}, "attention", "shared", 0),
        ({"lookahead": 0.0}, "attention", "shared", 2),
        ({"lookahead": 0.5}, "attention", "shared", 1),
        ({"lookahead": 0.5}, "attention", "shared", 2),
        ({"conditioning": "context"}, "mlp", "shared", 2),
        ({"denoiser": "edm"}, "mlp", "shared", 2),
        ({"denoiser": "edm", "lookahead": 0.5}, "attention", "frozen", 0),
        ({"denoiser": "plain", "conditioning": "context"}, "attention", "shared", 0),
    ],
)
def test_arithmetic_is_that_of_the_real_trainer(
    learning: dict[str, Any], mixer: str, interface: str, block: int, text: Text
) -> None:
    model = small_run().model.model_copy(update={"mixer": mixer})
    run = small_run(learning=LearningSpec.model_validate(learning), model=model, interface=interface)
    expected = sum(own_flops(run, block)) + upstream_flops(run, block)
    assert counted(LocalTrainer(run, block, text)) == expected


def test_a_frozen_interface_and_no_look_ahead_save_arithmetic() -> None:
    run, ahead = small_run(), small_run(learning=LearningSpec(lookahead=0.5))
    assert own_flops(small_run(interface="frozen"), 1)[1] < own_flops(run, 1)[1]
    evidence, head, projection, attention = 2 * 16 * 256, 2 * 16 * 256, 2 * 16 * 16, 2 * (2 * 2 * 8 * 16)
    forward, backward = (own_flops(ahead, 1)[part] - own_flops(run, 1)[part] for part in (0, 1))
    assert forward == upstream_flops(run, 1) + projection + evidence + head
    # Through the copy the gradient goes back to what it read and to no parameter: as many products as
    # forward, but none for the evidence, and two for each of attention's, whose factors both come from there.
    assert backward == forward - evidence + attention
    assert own_flops(ahead, 2) == own_flops(run, 2)


def counted(trainer: LocalTrainer) -> float:
    """Operations a token in one step; of attention's kernels on a CPU, PyTorch counts the plain one alone."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        trainer.step()
    assert torch.isfinite(trainer.hop.interface.head.weight).all()
    return counter.get_total_flops() / (trainer.run.training.batch * trainer.run.model.window)


def test_memory_of_a_block_and_of_a_full_replica() -> None:
    run = small_run()
    elements = sizes(run)
    block, whole = cost_of(run, BLOCKTRAIN), cost_of(run, METHODS["fedavg"])
    assert block.worst.parameters == elements["block-2"] + elements["interface"]
    assert block.worst.adamw_bytes == 16 * block.worst.parameters
    upstream = elements["block-0"] + elements["block-1"]
    assert block.worst.copies_bytes == pytest.approx(2 * upstream, rel=0.05)  # vectors stay float32
    mean = np.mean([elements["block-0"], elements["block-1"], elements["block-2"]])
    assert block.mean.parameters == pytest.approx(mean + elements["interface"])
    assert block.mean.copies_bytes == pytest.approx(block.worst.copies_bytes / 2, rel=0.1)
    # Without the upstream projections, three blocks and one interface.
    assert whole.worst == whole.mean
    assert whole.worst.parameters == pytest.approx(3 * elements["block-0"] + elements["interface"], rel=0.01)
    assert whole.worst.state_bytes == 16 * whole.worst.parameters
    assert block.worst.activation_bytes < whole.worst.activation_bytes
    context, ahead = (
        cost_of(small_run(learning=LearningSpec.model_validate(learning)), BLOCKTRAIN)
        for learning in ({"conditioning": "context"}, {"lookahead": 0.5})
    )
    assert context.worst.copies_bytes == 0
    # All but the last block copy the next one too: 1, 2 and 2 copies in place of 0, 1 and 2.
    assert ahead.worst.copies_bytes == block.worst.copies_bytes
    assert ahead.mean.copies_bytes > 1.5 * block.mean.copies_bytes


@pytest.mark.parametrize(
    ("name", "compression"), [*((name, "fp16") for name in METHODS), ("blocktrain", "int8")]
)
def test_traffic_is_that_of_a_simulated_round(name: str, compression: str) -> None:
    method = METHODS[name]
    run = small_run(round=small_run().round.model_copy(update={"compression": compression}))
    workers = method.workers(WORKERS)
    swarm = Swarm(method.run_of(run), None, workers, method=method)
    reports = list(swarm.play(3))
    assert [report.participation for report in reports] == [1.0] * 3
    cost = cost_of(run, method)
    moved = reports[2].bytes_moved - reports[1].bytes_moved
    if method.alone:
        assert moved == cost.mean.moved_bytes == cost.mean.leader_bytes == 0
        return
    # A group's leader neither sends its update nor fetches the version.
    saved = sum(
        encoded_size(size, dtype)
        for elements in sizes(swarm.run).values()
        for dtype, size in (
            (compression, elements),
            ("float32", payload_elements(swarm.run.training, elements)),
        )
    )
    assert moved == pytest.approx(workers * cost.mean.moved_bytes - saved)
    assert cost.round_tokens == reports[2].tokens / 3 / (workers / cost.blocks)


def test_the_leaders_share() -> None:
    run = small_run()
    elements, cost = sizes(run), cost_of(run, BLOCKTRAIN).worst
    own = elements["block-2"] + elements["interface"]
    assert cost.leader_bytes == (2 + 4) * own
    assert cost.leader_state_bytes == 4 * own
    fedavg, diloco = (cost_of(run, METHODS[name]).worst for name in ("fedavg", "diloco"))
    assert diloco.leader_state_bytes == 2 * fedavg.leader_state_bytes
    # Whoever leads next needs the momentum, so it travels with the version.
    assert (fedavg.leader_bytes, diloco.leader_bytes) == (
        (2 + 4) * fedavg.parameters, (2 + 8) * fedavg.parameters,
    )  # fmt: skip


def test_arithmetic_of_a_whole_training() -> None:
    run, tokens = small_run(), 1000
    whole = {name: cost_of(run, method).total_flops(tokens) for name, method in METHODS.items()}
    assert whole["fedavg"] == whole["local-sgd"] == whole["diloco"] == whole["end-to-end"]
    cost = cost_of(run, METHODS["end-to-end"]).mean
    assert whole["end-to-end"] == tokens * (cost.forward_flops + cost.backward_flops)
    # Heads and evidence of three blocks instead of one, and with `chain` the blocks upstream once more.
    assert whole["blocktrain"] > whole["end-to-end"]
    context = small_run(learning=LearningSpec(conditioning="context"))
    assert whole["end-to-end"] < cost_of(context, BLOCKTRAIN).total_flops(tokens) < whole["blocktrain"]
