"""Small runs and models whose parameters are all far from zero, so that every input matters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import group_module, unflatten_
from spheroid_node.run import INTERFACE_GROUP, ModelSpec, NoiseSpec, RunSpec, block_group

torch.set_num_threads(1)

MakeRun = Callable[..., RunSpec]

MIXERS, DENOISERS = ("attention", "mlp"), ("evidence", "edm", "plain")
CONDITIONINGS, READOUTS = ("chain", "context"), ("last", "mean")
RECIPES = [
    {"mixer": mixer, "denoiser": denoiser, "conditioning": conditioning, "readout": readout}
    for mixer, denoiser, conditioning, readout in product(MIXERS, DENOISERS, CONDITIONINGS, READOUTS)
]


@pytest.fixture
def make_run() -> MakeRun:
    """A run of two blocks; keywords change its model, its learning or the run itself."""

    def make(noise: NoiseSpec | None = None, **changes: object) -> RunSpec:
        model = {"blocks": 2, "layers": 2, "width": 16, "heads": 2, "window": 8}
        learning, rest = {}, {}
        for name, value in changes.items():
            part = model if name in ModelSpec.model_fields else rest
            (learning if name in ("denoiser", "conditioning", "readout") else part)[name] = value
        return RunSpec.model_validate(
            {"name": "model", "model": model, "learning": learning, "noise": noise or NoiseSpec(), **rest}
        )

    return make


@pytest.fixture
def run(make_run: MakeRun) -> RunSpec:
    return make_run()


def strong_model(run: RunSpec) -> ComposedModel:
    """A float64 model of normal parameters with deviation 0.4, modulation and head included."""
    generator = torch.Generator().manual_seed(5)
    model = ComposedModel(run).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def version_0(run: RunSpec) -> ComposedModel:
    model = ComposedModel(run).eval()
    for group in (*(block_group(block) for block in range(run.model.blocks)), INTERFACE_GROUP):
        unflatten_(group_module(model, group), initial_vector(run, group))
    return model


def text_and_noise(run: RunSpec, count: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [batch, count] and float64 noise [batch, count, width], always the same."""
    generator = torch.Generator().manual_seed(11)
    tokens_BT = torch.randint(256, (batch, count), generator=generator)
    return tokens_BT, torch.randn(batch, count, run.model.width, generator=generator, dtype=torch.float64)
