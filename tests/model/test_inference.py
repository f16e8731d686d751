"""Inference with caches equals inference without, nothing looks ahead, and a text may outgrow the window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spheroid_node.model.cache import BlockCache, segments
from spheroid_node.model.composed import ChainState, ComposedModel, Hop
from tests.model.conftest import MIXERS, RECIPES, MakeRun, strong_model, text_and_noise, version_0

POSITIONS, WINDOW = 27, 8
PIECES = (5, 1, 1, 9, 1, 8, 2)
"""Positions a step, past the window of 8, one step longer than it."""


def recipe_name(recipe: dict[str, str]) -> str:
    return "-".join(recipe.values())


class Chain:
    """All hops of a model with a cache each, as serving runs them."""

    def __init__(self, model: ComposedModel) -> None:
        self.hops: list[Hop] = [model.hop(index) for index in range(len(model.blocks))]
        self.caches: list[BlockCache] = [hop.block.new_cache() for hop in self.hops]

    def step(self, tokens_BT: Tensor, noise_BTD: Tensor) -> Tensor:
        """Every block's logits and the read-out at the new positions: [blocks + 1, B, T, 256]."""
        state, found = self.hops[0].start(noise_BTD), []
        for hop, cache in zip(self.hops, self.caches, strict=True):
            texts = segments([cache], [tokens_BT.shape[1]])
            state, logits_BTV = hop.step(tokens_BT, state, texts)
            found.append(logits_BTV)
        return torch.stack([*found, self.hops[-1].readout(state, logits_BTV).double()])

    def feed(self, tokens_BT: Tensor, noise_BTD: Tensor, start: int, pieces: tuple[int, ...]) -> Tensor:
        found = []
        for count in pieces:
            end = start + count
            found.append(self.step(tokens_BT[:, start:end], noise_BTD[:, start:end]))
            start = end
        return torch.cat(found, dim=2)

    def truncate(self, length: int) -> None:
        for cache in self.caches:
            cache.truncate(length)


def uncached(model: ComposedModel, tokens_BT: Tensor, noise_BTD: Tensor) -> Tensor:
    logits, read_out_BTV = model(tokens_BT, noise_BTD)
    return torch.stack([*logits, read_out_BTV.double()])


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
@torch.no_grad()
def test_cached_equals_uncached(make_run: MakeRun, recipe: dict[str, str]) -> None:
    model = strong_model(make_run(**recipe))
    tokens_BT, noise_BTD = text_and_noise(model.run, POSITIONS)
    expected = uncached(model, tokens_BT, noise_BTD)
    chain = Chain(model)
    found = chain.feed(tokens_BT, noise_BTD, 0, PIECES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # log-probabilities are float32
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-6, atol=1e-9)

    # Another text from position 6 on: nothing of the first may be left.
    chain.truncate(6)
    assert [cache.length for cache in chain.caches] == [6] * len(chain.caches)
    other_BT = torch.cat((tokens_BT[:, :6], tokens_BT[:, 6:].flip(1)), dim=1)
    found = chain.feed(other_BT, noise_BTD, 6, (3, 1, 10))
    expected = uncached(model, other_BT, noise_BTD)[:, :, 6:20]
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
@torch.no_grad()
def test_nothing_looks_ahead(make_run: MakeRun, recipe: dict[str, str]) -> None:
    model = strong_model(make_run(**recipe))
    tokens_BT, noise_BTD = text_and_noise(model.run, POSITIONS)
    before = uncached(model, tokens_BT, noise_BTD)
    for changed in (3, 15):
        other_BT, other_noise_BTD = tokens_BT.clone(), noise_BTD.clone()
        other_BT[:, changed] = (other_BT[:, changed] + 1) % 256
        other_noise_BTD[:, changed] += 1
        after = uncached(model, other_BT, other_noise_BTD)
        assert torch.equal(after[:, :, :changed], before[:, :, :changed])
        assert not torch.isclose(after[:, :, changed:], before[:, :, changed:]).all(dim=(-1, 1))[:, 0].any()


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_a_layer_sees_its_window_and_no_more(make_run: MakeRun, mixer: str) -> None:
    run = make_run(mixer=mixer, layers=1, denoiser="plain", conditioning="context")
    hop = strong_model(run).hop(0)
    tokens_BT, noise_BTD = text_and_noise(run, POSITIONS, batch=1)
    other_BT = tokens_BT.clone()
    other_BT[:, 4] = (other_BT[:, 4] + 1) % 256
    sigma_B = torch.ones(1, dtype=torch.float64)
    before, _ = hop.predict(tokens_BT, noise_BTD, noise_BTD, sigma_B)
    after, _ = hop.predict(other_BT, noise_BTD, noise_BTD, sigma_B)
    changed = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(4, 4 + WINDOW))


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_what_is_seen_does_not_depend_on_the_place_in_the_text(make_run: MakeRun, mixer: str) -> None:
    """The same last bytes give the same prediction, as far as the window of all layers reaches."""
    run = make_run(mixer=mixer, layers=1, denoiser="plain", conditioning="context")
    hop = strong_model(run).hop(0)
    tokens_BT, noise_BTD = text_and_noise(run, POSITIONS, batch=1)
    sigma_B = torch.ones(1, dtype=torch.float64)
    whole, _ = hop.predict(tokens_BT, noise_BTD, noise_BTD, sigma_B)
    tail, _ = hop.predict(tokens_BT[:, -WINDOW:], noise_BTD[:, -WINDOW:], noise_BTD[:, -WINDOW:], sigma_B)
    torch.testing.assert_close(tail[:, -1], whole[:, -1], rtol=1e-5, atol=1e-5)  # angles are float32


@torch.no_grad()
def test_a_block_reads_the_state_before_it_in_chain_runs_alone(make_run: MakeRun) -> None:
    for conditioning, block, reads in (("chain", 1, True), ("chain", 0, False), ("context", 1, False)):
        hop = strong_model(make_run(conditioning=conditioning)).hop(block)
        tokens_BT, noise_BTD = text_and_noise(hop.run, 5)
        sigma_B = torch.ones(2, dtype=torch.float64)
        one, _ = hop.predict(tokens_BT, noise_BTD, noise_BTD, sigma_B)
        other, _ = hop.predict(tokens_BT, noise_BTD.flip(1), noise_BTD, sigma_B)
        assert torch.equal(one, other) != reads


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_at_version_0_the_noise_level_changes_nothing(make_run: MakeRun, mixer: str) -> None:
    run = make_run(denoiser="edm", mixer=mixer)
    tokens_BT, noise_BTD = text_and_noise(run, 6)
    levels = torch.tensor([-1.0, 0.9]), torch.tensor([0.3, -0.2])
    for model, same in ((version_0(run), True), (strong_model(run), False)):
        dtype = next(model.parameters()).dtype
        hop, noise = model.hop(1), noise_BTD.to(dtype)
        outputs = [
            hop.block(hop.interface.embedding(tokens_BT), noise, noise, level.to(dtype)) for level in levels
        ]
        assert torch.equal(*outputs) == same


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
@torch.no_grad()
def test_half_precision_changes_little(make_run: MakeRun, mixer: str, denoiser: str) -> None:
    """Under autocast, and as a frozen copy: 8 bits of mantissa, so about a hundredth."""
    hop = version_0(make_run(mixer=mixer, denoiser=denoiser)).hop(1)
    tokens_BT, noise_BTD = text_and_noise(hop.run, 12)
    noise, sigma_B = noise_BTD.float(), torch.tensor([1.5, 3.0])
    exact_BTD, _ = hop.predict(tokens_BT, noise, noise, sigma_B)
    for copy in (False, True):
        if copy:
            hop.block.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found_BTD, logits_BTV = hop.predict(tokens_BT, noise, noise, sigma_B)
        error = (found_BTD.float() - exact_BTD).norm() / exact_BTD.norm()
        assert 1e-5 < error < 2e-2
        assert torch.isfinite(logits_BTV).all()


@torch.no_grad()
def test_the_chain_starts_at_the_highest_noise_and_ends_at_the_lowest(make_run: MakeRun) -> None:
    model = strong_model(make_run())
    tokens_BT, noise_BTD = text_and_noise(model.run, 5)
    state = model.hop(0).start(noise_BTD)
    torch.testing.assert_close(state.noisy_BTD, 10.0 * noise_BTD)
    assert not state.hidden_BTD.any()
    first = state.noisy_BTD
    for index in range(2):
        state, logits_BTV = model.hop(index).step(tokens_BT, state)
    # From σ = 10 to σ = 1 all that is left of the start is a tenth; the rest is a mean of unit-norm codes.
    assert ((state.noisy_BTD - first / 10).norm(dim=-1) <= 1 + 1e-6).all()
    assert torch.equal(model.hop(1).readout(state, logits_BTV), F.log_softmax(logits_BTV, -1))


@torch.no_grad()
def test_the_mean_read_out_is_the_geometric_mean_of_the_blocks(make_run: MakeRun) -> None:
    model = strong_model(make_run(blocks=3, readout="mean"))
    tokens_BT, noise_BTD = text_and_noise(model.run, 5)
    logits, found_BTV = model(tokens_BT, noise_BTD)
    product = torch.stack([part.softmax(-1) for part in logits]).prod(0) ** (1 / 3)
    torch.testing.assert_close(
        found_BTV.exp().double(), product / product.sum(-1, keepdim=True), rtol=1e-4, atol=1e-7
    )
    assert isinstance(model.hop(0).start(noise_BTD), ChainState)
