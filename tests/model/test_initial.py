"""Version 0: the same bytes everywhere, other ones for every group and seed, of the right size."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import named_tensors
from spheroid_node.run import INTERFACE_GROUP, RunSpec
from tests.model.conftest import MIXERS, MakeRun, text_and_noise, version_0

DIGESTS = {
    "attention": {
        "block-0": "0ef337d78190edc5",
        "block-1": "4a884a3c7d17d0b9",
        "interface": "297eefbe6b47d4b4",
    },
    "mlp": {"block-0": "f0ae0c406c6880e5", "block-1": "9a3ad43dd502ffe1", "interface": "297eefbe6b47d4b4"},
}
"""Of version 0 of a small edm run of seed 7. Who changes one changes what every swarm begins from."""


def tensors(run: RunSpec, group: str) -> dict[str, np.ndarray]:
    return named_tensors(run, group, initial_vector(run, group))


@pytest.mark.parametrize("mixer", MIXERS)
def test_version_0_is_the_same_bytes_everywhere(make_run: MakeRun, mixer: str) -> None:
    run = make_run(denoiser="edm", mixer=mixer, seed=7)
    found = {
        group: hashlib.blake2b(initial_vector(run, group).astype("<f4").tobytes(), digest_size=8).hexdigest()
        for group in run.groups
    }
    assert found == DIGESTS[mixer]


@pytest.mark.parametrize("mixer", MIXERS)
def test_groups_and_seeds_begin_differently(make_run: MakeRun, mixer: str) -> None:
    run = make_run(mixer=mixer, conditioning="context", seed=1)
    vectors = [initial_vector(run, "block-0"), initial_vector(run, "block-1")]
    vectors.append(initial_vector(run.model_copy(update={"seed": 2}), "block-0"))
    drawn = np.array(vectors)[:, vectors[0] != 1]  # norms are one everywhere
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 0.05
    assert np.array_equal(initial_vector(run, "block-0"), vectors[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_scales_of_version_0(make_run: MakeRun, mixer: str) -> None:
    run = make_run(denoiser="edm", mixer=mixer, width=64, window=32, layers=3)
    for name, tensor in tensors(run, "block-1").items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        elif name.startswith("modulation.out") or name.endswith("bias"):
            assert not tensor.any(), name
        elif not name.endswith("kernels"):
            into_the_stream = name.endswith(("attention.out.weight", "mixing.out.weight", "mlp.2.weight"))
            expected = 1 / math.sqrt(tensor.shape[1] * (6 if into_the_stream else 1))
            assert tensor.std() == pytest.approx(expected, rel=0.05), name
            assert abs(tensor.mean()) < 0.05 * expected * 2, name
    interface = tensors(run, INTERFACE_GROUP)
    assert interface["embedding.weight"].std() == pytest.approx(1, rel=0.02)
    assert not interface["head.weight"].any()
    frozen = tensors(run.model_copy(update={"interface": "frozen"}), INTERFACE_GROUP)
    assert frozen["head.weight"].std() == pytest.approx(1 / 8, rel=0.05)


def test_kernels_begin_with_reaches_of_every_order(make_run: MakeRun) -> None:
    run = make_run(mixer="mlp", width=64, window=24)
    kernels_KW = tensors(run, "block-0")["layers.0.mixing.kernels"]
    reaches, drawn = [1, 2, 4, 8, 16, 24], []
    for number, kernel_W in enumerate(kernels_KW):
        reach = reaches[number % 6]
        assert kernel_W[:reach].all()
        assert not kernel_W[reach:].any()
        drawn.append(kernel_W[:reach] * math.sqrt(reach))
    assert np.square(np.concatenate(drawn)).mean() == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
@torch.no_grad()
def test_the_signal_keeps_its_size(make_run: MakeRun, mixer: str, denoiser: str) -> None:
    run = make_run(mixer=mixer, denoiser=denoiser, width=64, window=32, layers=3)
    hop = version_0(run).hop(1)
    tokens_BT, noise_BTD = text_and_noise(run, 32)
    embedded_BTD, noise = hop.interface.embedding(tokens_BT), noise_BTD.float()
    sigma_B = torch.tensor([1.0, 10.0])
    z_BTD = sigma_B[:, None, None] * noise
    hidden_BTD, logits_BTV = hop.predict(tokens_BT, 5 * noise, z_BTD, sigma_B)
    # The inputs are two or three independent signals of deviation 1; the layers add as much at most.
    assert embedded_BTD.std().item() == pytest.approx(1, abs=0.05)
    assert 1.2 < hidden_BTD.std().item() < 2.2
    assert F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()).item() == pytest.approx(
        math.log(256)
    )
