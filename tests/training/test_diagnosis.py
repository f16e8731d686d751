from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.model.noise import NoiseSchedule
from spheroid_node.model.randomness import position_noise
from spheroid_node.run import NoiseSpec, RunSpec
from spheroid_node.training.diagnosis import diagnose
from spheroid_node.training.evaluation import chain_ce, from_noise
from spheroid_node.training.text import Text, held_out_windows
from tests.training.trained import fresh, trained

MakeRun = Callable[..., RunSpec]
DENOISERS = ("evidence", "edm", "plain")
LOW_NOISE = NoiseSpec(sigma_min=0.05, sigma_max=0.2, p_mean=math.log(0.1))
SHARPNESS = 20.0
"""Of the logits of the made-up blocks below."""


@pytest.fixture
def windows(text: Text) -> Tensor:
    return held_out_windows(text.held_out, 7, 32)


def ce(logits: NDArray[np.float64], targets: NDArray[np.int64]) -> float:
    """Mean cross-entropy, by numpy in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log_probs, targets[..., None], -1).mean())


def middle_sigma(spec: NoiseSpec, blocks: int, block: int) -> float:
    """The σ that half of the mass of the block's training interval lies above, by summing the density."""
    low, high = NoiseSchedule(spec, blocks).training_interval(block)
    logs = np.linspace(math.log(low), math.log(high), 200_001)
    mass = np.cumsum(np.exp(-0.5 * ((logs - spec.p_mean) / spec.p_std) ** 2))
    return math.exp(logs[np.searchsorted(mass, mass[-1] / 2)])


# --- blocks whose figures are known ---------------------------------------------------------------


class Unigram(nn.Module):
    """A head that says the same whatever it reads."""

    out_features = 256

    def __init__(self) -> None:
        super().__init__()
        self.logits_V = torch.linspace(-3, 2, 256)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.logits_V.expand(*hidden_BTD.shape[:2], -1)


class MadeUp(ComposedModel):
    """A model whose blocks are hops of the class given."""

    def __init__(self, run: RunSpec, kind: type[Hop]) -> None:
        super().__init__(run)
        self._kind = kind

    def hop(self, index: int) -> Hop:
        return self._kind(self.run, index, self.interface, super().hop(index).block)


class Leaky(Hop):
    """Says what z looks like, and nothing else."""

    def predict(self, tokens_BT, hidden_BTD, noisy_BTD, sigma_B, cache=None):  # type: ignore[no-untyped-def]
        return hidden_BTD, SHARPNESS * noisy_BTD @ self.interface.codes().T


class Telling(Hop):
    """Hands on the noise in its z; takes what it is told off its own z and says what that looks like."""

    def predict(self, tokens_BT, hidden_BTD, noisy_BTD, sigma_B, cache=None):  # type: ignore[no-untyped-def]
        sigma_B11 = sigma_B[:, None, None]
        cleaned_BTD = noisy_BTD - sigma_B11 * hidden_BTD
        return noisy_BTD / sigma_B11, SHARPNESS * cleaned_BTD @ self.interface.codes().T


class Bag(Hop):
    """Says how often each byte is in the context, in whatever order."""

    def predict(self, tokens_BT, hidden_BTD, noisy_BTD, sigma_B, cache=None):  # type: ignore[no-untyped-def]
        counts_B1V = F.one_hot(tokens_BT, 256).sum(1, keepdim=True).float()
        return hidden_BTD, counts_B1V.expand(-1, tokens_BT.shape[1], -1)


@pytest.mark.parametrize("readout", ["last", "mean"])
def test_one_that_always_says_the_same(make_run: MakeRun, windows: Tensor, readout: str) -> None:
    run = make_run(blocks=3, readout=readout)
    model = fresh(ComposedModel(run))
    model.interface.head = Unigram()  # type: ignore[assignment]
    found = diagnose(model, windows, seed=6)

    targets = windows[:, 1:].numpy()
    logits = np.broadcast_to(np.linspace(-3, 2, 256), (*targets.shape, 256))
    known = ce(logits, targets)
    for figures in (found.from_noise.ce, found.ce_alone, found.ce_at_sigma_max, found.ce_local):
        assert figures == pytest.approx([known] * 3, abs=1e-5)
    assert found.ce_scrambled == pytest.approx([known] * 3, abs=1e-5)
    readouts = (found.from_noise.ce_readout, found.from_noise.ce_mean_log_probs, found.ce_mean_last_two)
    assert (*readouts, found.ce_scrambled_readout) == pytest.approx((known,) * 4, abs=1e-5)
    assert found.leaking == []

    codes = model.interface.codes().double().numpy()
    noise = position_noise(6, 32, 32, 32).double().numpy()
    for block in range(3):
        sigma = middle_sigma(run.noise, 3, block)
        assert found.sigma_local[block] == pytest.approx(sigma, rel=1e-4)
        evidence = (codes[targets] + sigma * noise) @ codes.T / sigma**2
        assert found.ce_local_posterior[block] == pytest.approx(ce(logits + evidence, targets), abs=1e-3)
    assert found.ce_local_posterior[2] < found.ce_local_posterior[0] < known


def test_a_block_that_reads_the_target_out_of_z(make_run: MakeRun, windows: Tensor) -> None:
    run = make_run(denoiser="edm").model_copy(update={"noise": LOW_NOISE})
    model = fresh(MadeUp(run, Leaky))
    found = diagnose(model, windows, seed=2)

    targets, codes = windows[:, 1:].numpy(), model.interface.codes().double().numpy()
    noise, other = (position_noise(2, start, 32, 32).double().numpy() for start in (0, 32))
    blind = ce(np.broadcast_to(SHARPNESS * 0.2 * noise @ codes.T, (*targets.shape, 256)), targets)
    assert found.from_noise.ce[0] == pytest.approx(blind, abs=1e-4)
    assert found.ce_at_sigma_max == pytest.approx([blind] * 2, abs=1e-4)
    for block in range(2):
        noisy = codes[targets] + middle_sigma(LOW_NOISE, 2, block) * other
        local = ce(SHARPNESS * noisy @ codes.T, targets)
        assert found.ce_local[block] == pytest.approx(local, abs=1e-3) and local < 0.2
        alone = SHARPNESS * NoiseSchedule(LOW_NOISE, 2).sigma(block) * noise @ codes.T
        expected = ce(np.broadcast_to(alone, (*targets.shape, 256)), targets)
        assert found.ce_alone[block] == pytest.approx(expected, abs=1e-4)
    assert found.ce_local_posterior == found.ce_local and not found.adds_evidence
    assert found.leaking == [0, 1]


def test_the_chain_upstream_does_not_tell_the_noise_in_a_local_z(make_run: MakeRun, windows: Tensor) -> None:
    found = diagnose(fresh(MadeUp(make_run(denoiser="edm"), Telling)), windows)
    assert found.ce_local[1] > 5


def test_scrambled_is_the_same_bytes_in_another_order(make_run: MakeRun, windows: Tensor) -> None:
    found = diagnose(fresh(MadeUp(make_run(), Bag)), windows)
    assert found.ce_scrambled == pytest.approx(found.from_noise.ce, abs=1e-6)
    assert found.from_noise.ce[0] < math.log(256)


# --- blocks that have learnt ----------------------------------------------------------------------


@pytest.mark.parametrize("conditioning", ["chain", "context"])
@pytest.mark.parametrize("denoiser", DENOISERS)
def test_figures_agree_with_their_definitions(
    make_run: MakeRun, text: Text, windows: Tensor, denoiser: str, conditioning: str
) -> None:
    model = trained(make_run(denoiser=denoiser, conditioning=conditioning, readout="mean"), text)
    found = diagnose(model, windows, seed=3, batch=2)
    measured = from_noise(model, windows, seed=3, batch=2)
    assert found.from_noise.ce == pytest.approx(measured.ce, abs=1e-6)
    assert found.from_noise.ce_readout == pytest.approx(measured.ce_mean_log_probs, abs=1e-6)
    assert found.ce_mean_last_two == pytest.approx(measured.ce_mean_log_probs, abs=1e-6)
    assert found.ce_alone == pytest.approx(
        [chain_ce([model.hop(block)], windows, seed=3)[0] for block in range(2)], abs=1e-6
    )

    tokens, targets = windows[:, :-1], windows[:, 1:]
    noise = position_noise(3, 0, 32, 32).expand(7, -1, -1)
    sigma = torch.full((7,), 10.0)
    with torch.no_grad():
        state, _ = model.hop(0).step(tokens, model.hop(0).start(noise))
        _, logits = model.hop(1).predict(tokens, state.hidden_BTD, 10.0 * noise, sigma)
    assert found.ce_at_sigma_max[0] == pytest.approx(found.from_noise.ce[0], abs=1e-6)
    assert found.ce_at_sigma_max[1] == pytest.approx(ce(logits.double().numpy(), targets.numpy()), abs=1e-5)


@pytest.mark.parametrize("denoiser", ["evidence", "plain"])
def test_what_does_not_read_z_is_as_good_whatever_is_in_it(
    make_run: MakeRun, text: Text, windows: Tensor, denoiser: str
) -> None:
    model = trained(make_run(denoiser=denoiser, blocks=3), text)
    found = diagnose(model, windows)
    assert found.ce_local == pytest.approx(found.from_noise.ce, abs=1e-6)
    assert found.ce_local[0] == pytest.approx(found.ce_alone[0], abs=1e-6)
    assert found.ce_at_sigma_max == pytest.approx(found.from_noise.ce, abs=1e-6)
    assert found.leaking == [] and found.adds_evidence == (denoiser == "evidence")

    with torch.no_grad():
        logits, _ = model(windows[:, :-1], torch.zeros(7, 32, 32))
    last_two = (logits[1].log_softmax(-1) + logits[2].log_softmax(-1)) / 2
    expected = ce(last_two.double().numpy(), windows[:, 1:].numpy())
    assert found.ce_mean_last_two == pytest.approx(expected, abs=1e-5)


def test_a_chain_without_its_beginning_is_worse(make_run: MakeRun, text: Text, windows: Tensor) -> None:
    found = diagnose(trained(make_run(), text, steps=40), windows)
    assert found.ce_alone[1] > found.from_noise.ce[1] + 0.3


@pytest.mark.parametrize("conditioning", ["chain", "context"])
def test_edm_at_low_noise_leaks(make_run: MakeRun, text: Text, windows: Tensor, conditioning: str) -> None:
    run = make_run(denoiser="edm", conditioning=conditioning).model_copy(update={"noise": LOW_NOISE})
    found = diagnose(trained(run, text, steps=40), windows)
    assert max(found.ce_local) < 0.5 and min(found.from_noise.ce) > 3
    assert found.leaking == [0, 1]


def test_edm_at_high_noise_does_not(make_run: MakeRun, text: Text, windows: Tensor) -> None:
    found = diagnose(trained(make_run(denoiser="edm"), text, steps=40), windows)
    assert found.leaking == []
    assert found.ce_local[1] < found.from_noise.ce[1]


@pytest.mark.parametrize("denoiser", DENOISERS)
def test_the_context_is_used(make_run: MakeRun, text: Text, windows: Tensor, denoiser: str) -> None:
    found = diagnose(trained(make_run(denoiser=denoiser), text, steps=40), windows)
    assert found.ce_scrambled_readout == pytest.approx(found.ce_scrambled[-1], abs=1e-6)
    assert found.ce_scrambled_readout > found.from_noise.ce_readout + 1


# --- the same again -------------------------------------------------------------------------------


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_batches_and_windows_do_not_matter(
    make_run: MakeRun, text: Text, windows: Tensor, denoiser: str
) -> None:
    model = trained(make_run(denoiser=denoiser), text)
    whole = diagnose(model, windows, batch=16)
    assert flat(diagnose(model, windows, batch=1)) == pytest.approx(flat(whole), abs=1e-5)
    first, rest = diagnose(model, windows[:3]), diagnose(model, windows[3:])
    for name in ("ce_alone", "ce_at_sigma_max", "ce_local", "ce_local_posterior", "ce_scrambled"):
        parts = [(3 * a + 4 * b) / 7 for a, b in zip(getattr(first, name), getattr(rest, name), strict=True)]
        assert parts == pytest.approx(getattr(whole, name), abs=1e-5)


def test_the_seed_decides(make_run: MakeRun, text: Text, windows: Tensor) -> None:
    model = trained(make_run(denoiser="edm"), text)
    found, other = diagnose(model, windows, seed=1), diagnose(model, windows, seed=2)
    assert found == diagnose(model, windows, seed=1)
    for name in ("from_noise", "ce_alone", "ce_at_sigma_max", "ce_local", "ce_scrambled"):
        assert getattr(found, name) != getattr(other, name)


def test_it_is_json(make_run: MakeRun, text: Text, windows: Tensor) -> None:
    found = asdict(diagnose(fresh(ComposedModel(make_run(blocks=1))), windows))
    assert json.loads(json.dumps(found)) == found


def flat(value: object) -> list[float]:
    """All numbers of a diagnosis."""
    if isinstance(value, list | tuple):
        return [number for part in value for number in flat(part)]
    if isinstance(value, int | float):
        return [float(value)]
    return flat(list(asdict(value).values()) if not isinstance(value, dict) else list(value.values()))  # type: ignore[call-overload]
