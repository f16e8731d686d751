"""Preconditioning against EDM's identities, evidence against Bayes, the Euler step against closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.denoiser import Denoiser
from spheroid_node.run import NoiseSpec
from tests.model.conftest import DENOISERS, MakeRun, strong_model, text_and_noise

WIDTH = 16
SIGMA_DATA = 0.25
SIGMAS = torch.tensor([0.002, 0.05, 0.25, 1.0, 3.0, 10.0, 80.0], dtype=torch.float64)


@pytest.fixture
def edm(make_run: MakeRun) -> Denoiser:
    return Denoiser(make_run(denoiser="edm"))


@pytest.fixture
def evidence(make_run: MakeRun) -> Denoiser:
    return Denoiser(make_run(denoiser="evidence"))


def unit_codes(count: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=-1)


# --- preconditioning ------------------------------------------------------------------------------------


def test_scales_satisfy_the_identities_of_edm(edm: Denoiser) -> None:
    """Karras et al. 2022, appendix B.6."""
    skip, out, scale = edm.skip_scale(SIGMAS), edm.output_scale(SIGMAS), edm.input_scale(SIGMAS)
    ones = torch.ones_like(SIGMAS)
    torch.testing.assert_close(scale.square() * (SIGMAS.square() + SIGMA_DATA**2), ones)
    torch.testing.assert_close(out.square(), (1 - skip) ** 2 * SIGMA_DATA**2 + skip**2 * SIGMAS.square())
    torch.testing.assert_close(edm.weight(SIGMAS) * out.square(), SIGMA_DATA**2 * ones)
    for change in (-1e-3, 1e-3):  # c_skip is the one that leaves the network least to amplify
        other = (1 - skip - change) ** 2 * SIGMA_DATA**2 + (skip + change) ** 2 * SIGMAS.square()
        assert (other > out.square()).all()


def test_scales_at_the_ends(edm: Denoiser) -> None:
    none, much = torch.tensor([1e-9, 1e9], dtype=torch.float64)
    assert edm.skip_scale(none).item() == pytest.approx(1)
    assert edm.output_scale(none).item() == pytest.approx(0, abs=1e-8)
    assert edm.skip_scale(much).item() == pytest.approx(0, abs=1e-8)
    assert edm.output_scale(much).item() == pytest.approx(SIGMA_DATA)
    assert edm.weight(much).item() == pytest.approx(1)


@pytest.mark.parametrize("sigma", [0.05, 0.25, 1.0, 10.0])
def test_input_and_effective_target_have_unit_variance(edm: Denoiser, sigma: float) -> None:
    codes_VD = unit_codes(256, WIDTH)
    generator = torch.Generator().manual_seed(1)
    targets_BT = torch.randint(256, (64, 512), generator=generator)
    noise_BTD = torch.randn(64, 512, WIDTH, generator=generator, dtype=torch.float64)
    sigma_B = torch.full((64,), sigma, dtype=torch.float64)
    z_BTD = edm.add_noise(targets_BT, codes_VD, sigma_B, noise_BTD)
    y_BTD = codes_VD[targets_BT]
    target_BTD = (y_BTD - edm.skip_scale(sigma_B)[0] * z_BTD) / edm.output_scale(sigma_B)[0]
    # Half a million values: a standard error of 0.002, and 256 codes instead of all directions.
    assert (edm.input_scale(sigma_B)[0] * z_BTD).square().mean().item() == pytest.approx(1, abs=0.02)
    assert target_BTD.square().mean().item() == pytest.approx(1, abs=0.02)


def test_a_network_that_knows_the_target_makes_the_head_read_the_code(edm: Denoiser) -> None:
    codes_VD = unit_codes(256, WIDTH)
    targets_BT = torch.arange(14).view(7, 2)
    noise_BTD = unit_codes(14, WIDTH, seed=2).view(7, 2, WIDTH)
    z_BTD = edm.add_noise(targets_BT, codes_VD, SIGMAS, noise_BTD)
    c_skip = (SIGMA_DATA**2 / (SIGMAS**2 + SIGMA_DATA**2))[:, None, None]
    c_out = (SIGMAS * SIGMA_DATA / (SIGMAS**2 + SIGMA_DATA**2).sqrt())[:, None, None]
    f_BTD = (codes_VD[targets_BT] - c_skip * z_BTD) / c_out
    torch.testing.assert_close(edm.estimate(f_BTD, z_BTD, SIGMAS), codes_VD[targets_BT] / SIGMA_DATA)


@pytest.mark.parametrize("denoiser", ["evidence", "plain"])
def test_the_other_kinds_read_the_output_unchanged_and_weigh_nothing(
    make_run: MakeRun, denoiser: str
) -> None:
    other = Denoiser(make_run(denoiser=denoiser))
    output_BTD, z_BTD = unit_codes(14, WIDTH).view(7, 2, -1), unit_codes(14, WIDTH, seed=1).view(7, 2, -1)
    assert torch.equal(other.estimate(output_BTD, z_BTD, SIGMAS), output_BTD)
    assert torch.equal(other.weight(SIGMAS), torch.ones_like(SIGMAS))


def test_a_hop_reads_out_the_denoised_code(make_run: MakeRun) -> None:
    run = make_run(denoiser="edm")
    hop = strong_model(run).hop(1)
    tokens_BT, noise_BTD = text_and_noise(run, 6)
    sigma_B = torch.tensor([0.3, 2.0], dtype=torch.float64)
    z_BTD = sigma_B[:, None, None] * noise_BTD
    with torch.no_grad():
        hidden_BTD, logits_BTV = hop.predict(tokens_BT, torch.ones_like(noise_BTD), z_BTD, sigma_B)
        sigma = sigma_B[:, None, None]
        total = sigma**2 + SIGMA_DATA**2
        code_BTD = SIGMA_DATA**2 / total * z_BTD + sigma * SIGMA_DATA / total.sqrt() * hop.block.out_norm(
            hidden_BTD
        )
        expected_BTV = code_BTD / SIGMA_DATA @ hop.interface.head.weight.T
    torch.testing.assert_close(logits_BTV, expected_BTV)


@pytest.mark.parametrize(("low", "high"), [(1.0, 10.0), (0.002, 80.0)])
def test_the_noise_level_spans_the_range_of_the_run(make_run: MakeRun, low: float, high: float) -> None:
    denoiser = Denoiser(make_run(noise=NoiseSpec(sigma_min=low, sigma_max=high)))
    sigmas = torch.tensor([low, math.sqrt(low * high), high], dtype=torch.float64)
    assert denoiser.noise_level(sigmas).tolist() == pytest.approx([-1, 0, 1], abs=1e-9)


# --- evidence -------------------------------------------------------------------------------------------


def by_bayes(logits_V: np.ndarray, z_D: np.ndarray, sigma: float, codes_VD: np.ndarray) -> np.ndarray:
    """p(k | z) from the prior and the density of z around each code, one Gaussian a component."""
    prior = np.exp(logits_V) / np.exp(logits_V).sum()
    components_VD = np.exp(-(((z_D - codes_VD) / sigma) ** 2) / 2) / (sigma * math.sqrt(math.tau))
    density = components_VD.prod(axis=1)
    return prior * density / (prior * density).sum()


def small_alphabet() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits [4, 3, 5], z [4, 3, 3], σ [4], targets [4, 3], codes [5, 3]."""
    generator = torch.Generator().manual_seed(3)
    codes_VD, sigma_B = unit_codes(5, 3), torch.tensor([0.3, 0.7, 1.0, 4.0], dtype=torch.float64)
    logits_BTV = 2 * torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    targets_BT = torch.randint(5, (4, 3), generator=generator)
    noise_BTD = torch.randn(4, 3, 3, generator=generator, dtype=torch.float64)
    z_BTD = codes_VD[targets_BT] + sigma_B[:, None, None] * noise_BTD
    return logits_BTV, z_BTD, sigma_B, targets_BT, codes_VD


def test_the_posterior_is_that_of_bayes(evidence: Denoiser) -> None:
    logits_BTV, z_BTD, sigma_B, targets_BT, codes_VD = small_alphabet()
    found_BTV = evidence.posterior(logits_BTV, z_BTD, sigma_B, codes_VD).softmax(-1).numpy()
    nats = 0.0
    for text, position in np.ndindex(4, 3):
        at = text, position
        expected_V = by_bayes(
            logits_BTV[at].numpy(), z_BTD[at].numpy(), sigma_B[text].item(), codes_VD.numpy()
        )
        np.testing.assert_allclose(found_BTV[at], expected_V, rtol=1e-9)
        nats -= math.log(expected_V[targets_BT[at]]) / 12
    assert evidence.loss(logits_BTV, z_BTD, sigma_B, targets_BT, codes_VD).item() == pytest.approx(nats)


def test_evidence_tells_more_the_lower_the_noise(evidence: Denoiser) -> None:
    """Information in z about one of 256 equally likely bytes, against the table of paper.md, section 4."""
    codes_VD = unit_codes(256, 512)
    generator = torch.Generator().manual_seed(4)
    targets_BT = torch.randint(256, (1, 2000), generator=generator)
    for sigma, nats, tolerance in (
        (0.25, 5.01, 0.1),
        (0.5, 1.88, 0.1),
        (1.0, 0.47, 0.05),
        (10.0, 0.006, 0.01),
    ):
        sigma_B = torch.tensor([sigma], dtype=torch.float64)
        noise_BTD = torch.randn(1, 2000, 512, generator=generator, dtype=torch.float64)
        z_BTD = evidence.add_noise(targets_BT, codes_VD, sigma_B, noise_BTD)
        loss = evidence.loss(torch.zeros(1, 2000, 256).double(), z_BTD, sigma_B, targets_BT, codes_VD)
        assert math.log(256) - loss.item() == pytest.approx(nats, abs=tolerance), sigma


@pytest.mark.parametrize("denoiser", ["edm", "plain"])
def test_without_evidence_the_logits_are_the_posterior(make_run: MakeRun, denoiser: str) -> None:
    logits_BTV, z_BTD, sigma_B, targets_BT, codes_VD = small_alphabet()
    other = Denoiser(make_run(denoiser=denoiser))
    assert torch.equal(other.posterior(logits_BTV, z_BTD, sigma_B, codes_VD), logits_BTV)
    nats_BT = -logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
    weight_B = 1 + SIGMA_DATA**2 / sigma_B**2 if denoiser == "edm" else torch.ones(4, dtype=torch.float64)
    expected = (weight_B[:, None] * nats_BT).mean().item()
    assert other.loss(logits_BTV, z_BTD, sigma_B, targets_BT, codes_VD).item() == pytest.approx(expected)


# --- the Euler step -------------------------------------------------------------------------------------


def test_the_step_for_two_codes_is_that_of_the_known_posterior(evidence: Denoiser) -> None:
    """Codes ±1 with prior odds p: E[y | z] = tanh(z/σ² + ½ ln p)."""
    codes_VD = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    z, odds, sigma, next_sigma = 0.8, 3.0, 1.5, 0.6
    logits_BTV = torch.tensor([[[math.log(odds), 0.0]]], dtype=torch.float64)
    found = evidence.euler(logits_BTV, torch.full((1, 1, 1), z).double(), sigma, next_sigma, codes_VD)
    mean = math.tanh(z / sigma**2 + math.log(odds) / 2)
    # dz/dσ = (z − E[y | z])/σ is the probability flow (EDM, equations 1 and 3); one step along it.
    assert found.item() == pytest.approx(z + (next_sigma - sigma) * (z - mean) / sigma, abs=1e-6)


@pytest.mark.parametrize("denoiser", DENOISERS)
def test_a_step_to_no_noise_is_the_expected_code(make_run: MakeRun, denoiser: str) -> None:
    logits_BTV, z_BTD, sigma_B, _, codes_VD = small_alphabet()
    kind = Denoiser(make_run(denoiser=denoiser))
    sigma = sigma_B[2].item()
    logits_BTV, z_BTD = logits_BTV[2:3], z_BTD[2:3]
    found_BTD = kind.euler(logits_BTV, z_BTD, sigma, 0.0, codes_VD)
    for position in range(3):
        logits_V = logits_BTV[0, position].numpy()
        plain_V = np.exp(logits_V) / np.exp(logits_V).sum()
        bayes_V = by_bayes(logits_V, z_BTD[0, position].numpy(), sigma, codes_VD.numpy())
        weights_V = bayes_V if denoiser == "evidence" else plain_V
        np.testing.assert_allclose(found_BTD[0, position].numpy(), weights_V @ codes_VD.numpy(), rtol=1e-9)
    torch.testing.assert_close(kind.euler(logits_BTV, z_BTD, sigma, sigma, codes_VD), z_BTD)


def test_many_steps_follow_the_closed_form_of_gaussian_data(evidence: Denoiser) -> None:
    """Data N(0, s²): the probability flow takes z at σ to z·√((s² + σ_next²)/(s² + σ²))."""
    s, high, low, steps = 0.8, 5.0, 0.3, 400
    codes_VD = torch.linspace(-6, 6, 601, dtype=torch.float64)[:, None]
    start = torch.tensor([-7.0, -2.0, 0.5, 4.0], dtype=torch.float64).view(1, 4, 1)
    sigmas = np.geomspace(high, low, steps + 1)
    z_BTD = start
    for sigma, next_sigma in pairwise(sigmas.tolist()):
        # These codes have norms of their own, so the −|E|²/2σ² that unit norms cancel goes into the prior.
        logits_V = -(codes_VD[:, 0] ** 2) * (1 / (2 * s**2) + 1 / (2 * sigma**2))
        z_BTD = evidence.euler(logits_V.expand(1, 4, -1), z_BTD, sigma, next_sigma, codes_VD)
    expected = start * math.sqrt((s**2 + low**2) / (s**2 + high**2))
    torch.testing.assert_close(z_BTD, expected, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.5, 2.0, 10.0])
def test_one_step_for_gaussian_data(evidence: Denoiser, sigma: float) -> None:
    """The ideal denoiser of N(0, s²) is z·s²/(s² + σ²)."""
    s, z = 0.8, 1.3
    codes_VD = torch.linspace(-8, 8, 1601, dtype=torch.float64)[:, None]
    logits_V = -(codes_VD[:, 0] ** 2) * (1 / (2 * s**2) + 1 / (2 * sigma**2))
    noisy_BTD = torch.full((1, 1, 1), z, dtype=torch.float64)
    found = evidence.euler(logits_V[None, None], noisy_BTD, sigma, sigma / 4, codes_VD).item()
    denoised = z * s**2 / (s**2 + sigma**2)
    assert found == pytest.approx(denoised + (z - denoised) / 4, abs=1e-6)


# --- what z may change ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["attention", "mlp"])
@pytest.mark.parametrize("denoiser", DENOISERS)
def test_only_edm_lets_z_change_a_prediction(make_run: MakeRun, denoiser: str, mixer: str) -> None:
    model: ComposedModel = strong_model(make_run(denoiser=denoiser, mixer=mixer, readout="mean"))
    tokens_BT, noise_BTD = text_and_noise(model.run, 12)
    with torch.no_grad():
        logits, read_out_BTV = model(tokens_BT, noise_BTD)
        other_logits, other_read_out_BTV = model(tokens_BT, noise_BTD.flip(1))
    for one, other in zip((*logits, read_out_BTV), (*other_logits, other_read_out_BTV), strict=True):
        assert torch.equal(one, other) == (denoiser != "edm")


@pytest.mark.parametrize("denoiser", ["evidence", "plain"])
def test_these_kinds_have_no_parameters_for_noise(make_run: MakeRun, denoiser: str) -> None:
    names = [name for name, _ in ComposedModel(make_run(denoiser=denoiser)).named_parameters()]
    assert not any("noisy" in name or "modulation" in name for name in names)
    assert any("noisy" in name for name, _ in ComposedModel(make_run(denoiser="edm")).named_parameters())
