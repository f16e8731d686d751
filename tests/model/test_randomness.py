"""Randomness as a function of its arguments, however it is cut."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.model.randomness import decide, gumbel_noise, position_noise, stream

SEEDS = st.integers(0, 2**63 - 1)


@given(SEEDS, st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_noise_of_positions_does_not_depend_on_how_they_are_cut(
    seed: int, start: int, counts: list[int]
) -> None:
    whole = position_noise(seed, start, sum(counts), 6)
    pieces, position = [], start
    for count in counts:
        pieces.append(position_noise(seed, position, count, 6))
        position += count
    assert torch.equal(torch.cat(pieces), whole)


def test_noise_is_standard_normal_and_independent() -> None:
    noise = position_noise(3, 0, 400, 50)
    assert noise.mean().item() == pytest.approx(0, abs=0.03)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    for other in (position_noise(3, 400, 400, 50), position_noise(4, 0, 400, 50), noise.roll(1, 0)):
        assert torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1].abs() < 0.03


def test_noise_is_the_same_on_every_machine() -> None:
    """protocols/hop.md promises these numbers to other clients."""
    noise = position_noise(9, 5, 3, 32).numpy().astype("<f4").tobytes()
    assert hashlib.blake2b(noise, digest_size=8).hexdigest() == "b4a112a37ce979f1"
    generator = np.random.Generator(np.random.Philox(key=[9, 1], counter=[0, 6, 0, 0]))
    expected = generator.standard_normal(32, dtype=np.float32)
    assert np.array_equal(position_noise(9, 5, 3, 32)[1].numpy(), expected)


def test_streams_are_named_by_their_words() -> None:
    names = [(0,), (1,), (0, 1), (0, 0, 1), (1, 1), (0, 2**40)]
    drawn = {name: stream(5, *name).integers(2**63) for name in names}
    assert drawn[(0,)] == stream(5, 0).integers(2**63) == stream(5).integers(2**63)
    assert len(set(drawn.values())) == len(names)
    assert stream(6, 1).integers(2**63) != drawn[(1,)]
    with pytest.raises(ValueError, match="three words"):
        stream(5, 1, 2, 3, 4)


def test_bytes_are_sampled_with_their_probabilities() -> None:
    logits_V = torch.full((256,), -30.0)
    logits_V[[3, 100, 255]] = torch.tensor([0.5, 0.2, 0.3]).log()
    for temperature, sharper in ((1.0, 1.0), (0.5, 2.0)):
        weights = np.array([0.5, 0.2, 0.3]) ** sharper
        counts = np.bincount([decide(logits_V, 7, q, temperature) for q in range(3000)], minlength=256)
        assert counts.sum() == counts[[3, 100, 255]].sum()
        np.testing.assert_allclose(counts[[3, 100, 255]] / 3000, weights / weights.sum(), atol=0.03)
    assert {decide(logits_V, 7, position, 0.0) for position in range(5)} == {3}


@given(SEEDS, st.integers(0, 2**40))
def test_sampling_noise_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    noise = gumbel_noise(seed, position)
    assert torch.equal(noise, gumbel_noise(seed, position))
    assert torch.isfinite(noise).all()
    assert not torch.equal(noise, gumbel_noise(seed, position + 1))
