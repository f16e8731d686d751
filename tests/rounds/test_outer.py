from __future__ import annotations

import numpy as np
import pytest
import torch

from spheroid_node.rounds.outer import first_payload, next_payload, payload_elements
from spheroid_node.run import TrainingSpec
from spheroid_node.wire.tensors import Vector

NESTEROV = TrainingSpec(outer="nesterov", outer_rate=0.5, outer_momentum=0.8)


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def test_an_average_is_float32_and_leaves_its_base_alone() -> None:
    base, training = vector(1.0, 2.0), TrainingSpec()
    assert first_payload(training, base) is base
    assert payload_elements(training, 2) == 2
    version = next_payload(training, base, vector(0.5, -0.5))
    assert version.dtype == np.float32
    assert (version.tolist(), base.tolist()) == ([1.5, 1.5], [1.0, 2.0])


def test_nesterov_by_hand() -> None:
    base = first_payload(NESTEROV, vector(1.0, -1.0))
    assert base.tolist() == [1.0, -1.0, 0.0, 0.0]
    # v = (1, 2); θ + 0.5·((1, 2) + 0.8·(1, 2))
    first = next_payload(NESTEROV, base, vector(1.0, 2.0))
    np.testing.assert_allclose(first, [1.9, 0.8, 1.0, 2.0], rtol=1e-6)
    # v = 0.8·(1, 2) + (−1, 0) = (−0.2, 1.6); θ + 0.5·((−1, 0) + 0.8·(−0.2, 1.6))
    second = next_payload(NESTEROV, first, vector(-1.0, 0.0))
    np.testing.assert_allclose(second, [1.32, 1.44, -0.2, 1.6], rtol=1e-6)
    assert second.dtype == np.float32
    assert base.tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.99)])
def test_nesterov_is_that_of_pytorch(rate: float, momentum: float) -> None:
    training = TrainingSpec(outer="nesterov", outer_rate=rate, outer_momentum=momentum)
    updates = np.random.default_rng(1).standard_normal((5, 7), dtype=np.float32)
    start = np.linspace(-1, 1, 7, dtype=np.float32)
    outside = torch.nn.Parameter(torch.from_numpy(start.copy()))
    nesterov = momentum > 0  # PyTorch has none without momentum
    optimiser = torch.optim.SGD([outside], lr=rate, momentum=momentum, nesterov=nesterov)
    payload = first_payload(training, start)
    for update in updates:
        outside.grad = -torch.from_numpy(update)
        optimiser.step()
        payload = next_payload(training, payload, update)
        np.testing.assert_allclose(payload[:7], outside.detach().numpy(), rtol=1e-5, atol=1e-6)
