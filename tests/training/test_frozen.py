from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spheroid_node.model.block import Block
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import elements, flatten, unflatten_
from spheroid_node.run import RunSpec
from spheroid_node.training.device import mixed_precision
from spheroid_node.training.frozen import FrozenBlock, bytes_of, half_dtype
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.text import Text

MakeRun = Callable[..., RunSpec]


def inputs(run: RunSpec) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, run.model.window, run.model.width)
    return *(torch.randn(shape, generator=generator) for _ in range(3)), torch.zeros(2)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_a_copy_computes_what_the_block_does(make_run: MakeRun, denoiser: str, mixed: bool) -> None:
    run = make_run(denoiser=denoiser)
    block, copy = Block(run, 1), FrozenBlock(run, 1, half_dtype(mixed))
    for module in (block, copy):
        unflatten_(module, initial_vector(run, "block-1"))
    with torch.no_grad(), mixed_precision(torch.device("cpu"), mixed):
        exact, rounded = block(*inputs(run)), copy(*inputs(run))
    # In bfloat16 both round the matrices alike; in float32 the copy's have 11 bits.
    torch.testing.assert_close(rounded, exact, rtol=0.0, atol=1e-5 if mixed else 1e-2)
    assert rounded.dtype == exact.dtype == torch.float32


def test_a_copy_passes_gradients_through_and_keeps_none(run: RunSpec) -> None:
    copy = FrozenBlock(run, 1, half_dtype(mixed=False))
    unflatten_(copy, initial_vector(run, "block-1"))
    embedded_BTD, hidden_BTD, noisy_BTD, level_B = inputs(run)
    hidden_BTD.requires_grad_()
    copy(embedded_BTD, hidden_BTD, noisy_BTD, level_B).square().sum().backward()  # type: ignore[no-untyped-call]
    assert hidden_BTD.grad is not None
    assert hidden_BTD.grad.any()
    assert all(parameter.grad is None for parameter in copy.parameters())


def test_a_copy_takes_two_bytes_a_parameter(make_run: MakeRun, text: Text) -> None:
    run = make_run(blocks=3, lookahead=0.5)
    trainer = LocalTrainer(run, 1, text)
    copied = elements(run, "block-0") + elements(run, "block-2")
    # Norms are vectors, and stay float32: three of them in a block of one layer.
    assert trainer.copied_bytes == 2 * copied + 2 * 2 * 3 * run.model.width
    assert LocalTrainer(make_run(conditioning="context"), 1, text).copied_bytes == 0


def test_a_copy_is_refreshed_from_a_float32_vector(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 1, text)
    vector = initial_vector(run, "block-0") * 1.5
    trainer.load("block-0", 1, 0, vector)
    copy = trainer.upstream[0].block
    assert isinstance(copy, FrozenBlock)
    torch.testing.assert_close(
        torch.from_numpy(flatten(copy)), torch.from_numpy(vector), rtol=1e-3, atol=1e-6
    )
    assert bytes_of(copy) == trainer.copied_bytes


def test_the_cost_of_upstream_is_reported(run: RunSpec, text: Text) -> None:
    assert LocalTrainer(run, 0, text).train(3).upstream_seconds == 0.0
    outcome = LocalTrainer(run, 1, text).train(3)
    assert 0.0 < outcome.upstream_seconds < outcome.seconds
