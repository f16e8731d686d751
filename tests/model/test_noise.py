"""The partition of the noise against a numerical integral of the density it is cut from."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.model.noise import NoiseSchedule
from spheroid_node.run import NoiseSpec
from tests.model.conftest import MakeRun, text_and_noise

SPECS = [
    NoiseSpec(),
    NoiseSpec(sigma_min=0.002, sigma_max=80.0, p_mean=-1.2, p_std=1.2, overlap=0.1),
    NoiseSpec(sigma_min=0.1, sigma_max=2.0, p_mean=-0.8, p_std=0.9),
    NoiseSpec(sigma_min=2.0, sigma_max=20.0, overlap=0.0),
]
BLOCKS = (1, 3, 7)
CASES = [pytest.param(spec, blocks, id=f"{spec.sigma_min}-{blocks}") for spec in SPECS for blocks in BLOCKS]


def mass(spec: NoiseSpec, low: float, high: float) -> float:
    """Integral of the log-normal density of σ from ``low`` to ``high``, by Simpson's rule over ln σ."""
    log_sigma = np.linspace(math.log(low), math.log(high), 2001)
    density = np.exp(-(((log_sigma - spec.p_mean) / spec.p_std) ** 2) / 2) / (
        spec.p_std * math.sqrt(math.tau)
    )
    weights = np.ones(2001)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float(density @ weights) * (log_sigma[1] - log_sigma[0]) / 3


@pytest.mark.parametrize(("spec", "blocks"), CASES)
def test_intervals_have_equal_mass_and_fall_from_the_highest_noise(spec: NoiseSpec, blocks: int) -> None:
    schedule = NoiseSchedule(spec, blocks)
    whole = mass(spec, spec.sigma_min, spec.sigma_max)
    for block in range(blocks):
        assert mass(spec, *schedule.interval(block)) / whole == pytest.approx(1 / blocks, rel=1e-6)
    assert all(high > low for high, low in pairwise(schedule.edges))
    assert (schedule.edges[0], schedule.edges[-1]) == (spec.sigma_max, spec.sigma_min)
    assert schedule.interval(0)[1] == schedule.sigma(0) == spec.sigma_max
    assert schedule.interval(blocks - 1)[0] == schedule.next_sigma(blocks - 1) == spec.sigma_min
    for block in range(blocks - 1):
        assert schedule.next_sigma(block) == schedule.sigma(block + 1) == schedule.interval(block)[0]


@pytest.mark.parametrize(("spec", "blocks"), CASES)
def test_sampling_inverts_the_integral(spec: NoiseSpec, blocks: int) -> None:
    schedule = NoiseSchedule(spec, blocks)
    uniform = torch.tensor([0.0, 0.03, 0.25, 0.5, 0.9, 0.999], dtype=torch.float64)
    for block in range(blocks):
        low, high = schedule.training_interval(block)
        found = [
            mass(spec, low, sigma) / mass(spec, low, high)
            for sigma in schedule.sample(block, uniform).tolist()
        ]
        assert found == pytest.approx(uniform.tolist(), abs=1e-5)


@pytest.mark.parametrize(("spec", "blocks"), CASES)
def test_neighbours_overlap_by_a_share_of_their_log_range_within_the_run(
    spec: NoiseSpec, blocks: int
) -> None:
    schedule = NoiseSchedule(spec, blocks)
    for block in range(blocks):
        low, high = schedule.interval(block)
        wide_low, wide_high = schedule.training_interval(block)
        reach = spec.overlap * math.log(high / low)
        assert math.log(wide_high) == pytest.approx(min(math.log(high) + reach, math.log(spec.sigma_max)))
        assert math.log(wide_low) == pytest.approx(max(math.log(low) - reach, math.log(spec.sigma_min)))


def test_a_wide_overlap_stays_within_the_run() -> None:
    spec = NoiseSpec(overlap=0.9)
    for block in range(3):
        low, high = NoiseSchedule(spec, 3).training_interval(block)
        assert spec.sigma_min <= low < high <= spec.sigma_max
        sampled = NoiseSchedule(spec, 3).sample(
            block, torch.rand(1000, generator=torch.Generator().manual_seed(0))
        )
        assert spec.sigma_min * (1 - 1e-6) <= sampled.min() < sampled.max() <= spec.sigma_max * (1 + 1e-6)


@pytest.mark.parametrize(("spec", "blocks"), CASES)
def test_noise_to_block_is_the_inverse_of_block_to_noise(spec: NoiseSpec, blocks: int) -> None:
    schedule = NoiseSchedule(spec.model_copy(update={"overlap": 0.0}), blocks)
    uniform = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    for block in range(blocks):
        assert schedule.block_of(schedule.sigma(block)) == block
        assert {schedule.block_of(sigma) for sigma in schedule.sample(block, uniform).tolist()} == {block}
    assert schedule.block_of(spec.sigma_min) == blocks - 1
    for outside in (spec.sigma_min * 0.999, spec.sigma_max * 1.001):
        with pytest.raises(ValueError, match="outside"):
            schedule.block_of(outside)


def test_inference_runs_every_block_at_noise_of_its_training_interval(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(blocks=5, denoiser="edm")
    used: list[tuple[int, float]] = []
    predict = Hop.predict

    def recorded(hop: Hop, *arguments: Any) -> Any:
        used.extend((hop.index, sigma) for sigma in arguments[3].tolist())
        return predict(hop, *arguments)

    monkeypatch.setattr(Hop, "predict", recorded)
    tokens_BT, noise_BTD = text_and_noise(run, 4, batch=1)
    with torch.no_grad():
        ComposedModel(run)(tokens_BT, noise_BTD.float())
    schedule = NoiseSchedule(run.noise, 5)
    assert [block for block, _ in used] == [0, 1, 2, 3, 4]
    assert [sigma for _, sigma in used] == sorted((sigma for _, sigma in used), reverse=True)
    for block, sigma in used:
        low, high = schedule.training_interval(block)
        assert low <= sigma <= high * (1 + 1e-6)
