"""The MLP over positions against loops that are plainly right, and what a layer keeps of a text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spheroid_node.model.mixing import Mixing, distance_matrices
from spheroid_node.model.transformer import Attention
from spheroid_node.run import ModelSpec

WINDOW = 5


def make_mixing(width: int = 24, window: int = WINDOW) -> Mixing:
    model = ModelSpec(blocks=1, layers=1, width=width, heads=2, window=window, mixer="mlp")
    mixing = Mixing(model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixing.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return mixing


def by_hand(mixing: Mixing, inputs_BTH: Tensor) -> Tensor:
    """Every channel at every position as a sum over the distances 0 … window − 1."""
    kernels, window = mixing.kernels.shape
    _, count, hidden = inputs_BTH.shape
    mixed_BTH = torch.zeros_like(inputs_BTH)
    for channel in range(hidden):
        kernel_W = mixing.kernels[channel // (hidden // kernels)]
        for position in range(count):
            for distance in range(min(window, position + 1)):
                mixed_BTH[:, position, channel] += (
                    kernel_W[distance] * inputs_BTH[:, position - distance, channel]
                )
    return mixed_BTH


@pytest.mark.parametrize("count", [1, 3, WINDOW, 12])
@torch.no_grad()
def test_mixing_is_a_causal_sum_over_the_window(count: int) -> None:
    mixing = make_mixing()
    x_BTD = torch.randn(2, count, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gelu = torch.nn.functional.gelu
    expected_BTD = gelu(by_hand(mixing, x_BTD @ mixing.read.weight.T)) @ mixing.out.weight.T
    torch.testing.assert_close(mixing(x_BTD, None), expected_BTD)


def test_distance_matrices() -> None:
    kernel = torch.tensor([[1.0, 2.0, 3.0]])
    assert distance_matrices(kernel, 2, 5).tolist() == [[[0, 3, 2, 1, 0], [0, 0, 3, 2, 1]]]
    assert distance_matrices(kernel, 2, 2).tolist() == [[[1, 0], [2, 1]]]
    assert distance_matrices(kernel, 1, 1).tolist() == [[[1]]]
    assert distance_matrices(kernel, 1, 5).tolist() == [[[0, 0, 3, 2, 1]]]


def test_gradients_are_those_of_the_formula() -> None:
    mixing = make_mixing(width=4, window=3)
    x_BTD = torch.randn(
        2, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, _: mixing(x, ()), (x_BTD, mixing.kernels))


@pytest.mark.parametrize("width", [6, 16, 24, 128])
def test_it_is_about_as_large_as_attention(width: int) -> None:
    """Kernels aside: those are at most 16, each a window long."""
    model = ModelSpec(blocks=1, layers=1, width=width, heads=1, window=16, mixer="mlp")
    sizes = [sum(p.numel() for p in module.parameters()) for module in (Mixing(model), Attention(model))]
    assert sizes[0] - Mixing(model).kernels.numel() == sizes[1]
    assert Mixing(model).kernels.shape[0] <= 16
