from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.parameters import flatten, group_module
from spheroid_node.model.randomness import position_noise
from spheroid_node.run import RunSpec
from spheroid_node.training.evaluation import Evaluation, from_noise
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.text import Text, held_out_windows
from tests.training.trained import fresh, trained

MakeRun = Callable[..., RunSpec]


def test_a_ruined_model_is_measured_too() -> None:
    assert Evaluation.of([9000.0], 9000.0, 9000.0, 8).perplexity == math.inf
    assert math.isnan(Evaluation.of([math.nan], math.nan, math.nan, 8).perplexity)


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
@pytest.mark.parametrize("readout", ["last", "mean"])
def test_figures_agree_with_their_definitions(
    make_run: MakeRun, text: Text, denoiser: str, readout: str
) -> None:
    model = trained(make_run(denoiser=denoiser, readout=readout), text)
    windows = held_out_windows(text.held_out, 5, 32)
    found = from_noise(model, windows, seed=3, batch=2)

    with torch.no_grad():
        logits, _ = model(windows[:, :-1], position_noise(3, 0, 32, 32).expand(5, -1, -1))
    mean = torch.stack([F.log_softmax(part, -1) for part in logits]).mean(0)
    ce = [F.cross_entropy(part.flatten(0, 1), windows[:, 1:].flatten()).item() for part in (*logits, mean)]
    assert found.ce == pytest.approx(ce[:2], abs=1e-5)
    assert found.ce_mean_log_probs == pytest.approx(ce[2], abs=1e-5)
    assert found.ce_readout == pytest.approx(ce[2 if readout == "mean" else 1], abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.ce_readout))
    assert found.bits_per_byte == pytest.approx(found.ce_readout / math.log(2))
    assert found.bytes == 5 * 32
    assert found.ce[0] < 5


def test_an_untrained_model_knows_nothing(run: RunSpec, text: Text) -> None:
    found = from_noise(fresh(ComposedModel(run)), held_out_windows(text.held_out, 4, 32))
    assert found.bits_per_byte == pytest.approx(8, abs=1e-4)


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_batches_and_windows_do_not_matter(make_run: MakeRun, text: Text, denoiser: str) -> None:
    model = trained(make_run(denoiser=denoiser), text)
    windows = held_out_windows(text.held_out, 6, 32)
    whole = from_noise(model, windows, batch=16)
    assert from_noise(model, windows, batch=1).ce == pytest.approx(whole.ce, abs=1e-6)
    first, rest = from_noise(model, windows[:2]), from_noise(model, windows[2:])
    parts = [(2 * a + 4 * b) / 6 for a, b in zip(first.ce, rest.ce, strict=True)]
    assert parts == pytest.approx(whole.ce, abs=1e-6)


def test_the_noise_is_fixed_by_the_seed(make_run: MakeRun, text: Text) -> None:
    model = trained(make_run(denoiser="edm"), text)
    windows = held_out_windows(text.held_out, 4, 32)
    assert from_noise(model, windows, seed=1) == from_noise(model, windows, seed=1)
    assert from_noise(model, windows, seed=1).ce != from_noise(model, windows, seed=2).ce


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_a_worker_measures_what_the_composed_model_does(make_run: MakeRun, text: Text, denoiser: str) -> None:
    run = make_run(denoiser=denoiser)
    model = trained(run, text)
    trainer = LocalTrainer(run, 1, text)
    for group in run.groups:
        trainer.load(group, 1, 1, flatten(group_module(model, group)))
    windows = held_out_windows(text.held_out, 8, 32)
    # The worker's copies of the blocks upstream are in half precision.
    assert trainer.evaluate(windows, seed=4) == pytest.approx(from_noise(model, windows, seed=4).ce, abs=1e-3)
