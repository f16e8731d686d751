"""Shapes of which one layer is stored, and chains on loopback that serve them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.parameters import elements
from spheroid_node.net.links import Traffic
from spheroid_node.run import INTERFACE_GROUP, ModelSpec, RunSpec, block_group
from spheroid_node.serving import logical
from spheroid_node.serving.chain import ChainLost
from spheroid_node.serving.local import LocalChain
from spheroid_node.serving.logical import LogicalModel
from spheroid_node.serving.loopback import loopback_chain, time_sweeps
from spheroid_node.serving.remote import Generation, RemoteChain
from spheroid_node.training.plan import total_elements
from spheroid_node.wire.codes import ErrorCode
from tests.serving.memory import MakeSwarm


def run_of(blocks: int = 3, layers: int = 2, width: int = 32, **learning: Any) -> RunSpec:
    model = ModelSpec(blocks=blocks, layers=layers, width=width, heads=2, window=24)
    return RunSpec(name="logical", model=model, learning=learning)  # type: ignore[arg-type]


def unrolled(logical: LogicalModel) -> ComposedModel:
    """The model that ``logical`` stands for: every layer of every block has weights of its own."""
    model = ComposedModel(logical.hops[0].run)
    model.interface.load_state_dict(logical.hops[0].interface.state_dict())
    for block, hop in zip(model.blocks, logical.hops, strict=True):
        block.load_state_dict(hop.block.state_dict())
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("generated", [False, True])
def test_one_layer_is_stored_and_no_more(dtype: torch.dtype, generated: bool) -> None:
    run, single = run_of(blocks=5, layers=4), run_of(blocks=5, layers=1)
    model = LogicalModel(run, dtype)
    if generated:
        model.generate()
        storages = {
            parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
            for hop in model.hops
            for parameter in hop.parameters()
        }
        assert sum(storages.values()) == model.stored_bytes
    stored = elements(single, block_group(1)) + elements(single, INTERFACE_GROUP)
    assert model.stored_bytes == stored * dtype.itemsize
    assert all(len(hop.block.layers) == 4 for hop in model.hops)
    assert total_elements(run) > 8 * stored


@pytest.mark.parametrize("drawn", [1009, 16_777_213])
def test_every_element_is_generated_and_of_the_right_size(
    drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logical, "DRAWN", drawn)
    hop = LogicalModel(run_of(), torch.float32).generate().hops[1]
    for name, parameter in hop.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
            continue
        deviation = 1.0 if "embedding" in name else 1 / math.sqrt(parameter.shape[1])
        assert 0 < parameter.abs().max() <= 1.7321 * deviation
        assert (parameter != 0).float().mean() > 0.99
        assert len(parameter.unique(dim=0)) == len(parameter)
        if drawn > parameter.numel():
            assert parameter.std() == pytest.approx(deviation, rel=0.1)


def test_the_seed_makes_the_weights() -> None:
    first, again, other = (
        LogicalModel(run_of(), torch.bfloat16).generate(seed).hops[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first.interface.head.weight, again.interface.head.weight)
    assert not torch.equal(first.interface.head.weight, other.interface.head.weight)


HALF, SINGLE = (torch.bfloat16, 0.25), (torch.float32, 2e-3)
"""Precisions, and by how much log-probabilities may be off."""


@pytest.mark.parametrize(
    ("precision", "learning"),
    [
        (HALF, {}),
        (HALF, {"readout": "mean"}),
        (HALF, {"conditioning": "context"}),
        (SINGLE, {}),
        (SINGLE, {"denoiser": "edm"}),
    ],
    ids=str,
)
async def test_a_sweep_is_that_of_the_model_it_stands_for(
    precision: tuple[torch.dtype, float], learning: dict[str, Any]
) -> None:
    dtype, tolerance = precision
    model = LogicalModel(run_of(**learning), dtype).generate(5)
    local = LocalChain(unrolled(model), seed=3, logits=True)
    async with loopback_chain(model.hops, Traffic(), Generation(seed=3, logits=True)) as remote:
        for position, tokens, masked in ((0, b"The castle was old", 4), (18, b" and", 0), (10, b"x", 2)):
            found, expected = [
                await chain.sweep(position, tokens, masked, decide=3 if masked else 1)
                for chain in (remote, local)
            ]
            assert found.logits is not None and expected.logits is not None
            assert expected.logits.std() > 0.5
            np.testing.assert_allclose(found.logits, expected.logits, atol=tolerance)
            assert found.position == expected.position and len(found.seconds) == 3


async def test_the_deepest_block_stays_within_half_precision() -> None:
    model = LogicalModel(run_of(blocks=2, layers=256), torch.bfloat16).generate()
    state = model.hops[0].start(torch.randn(1, 8, 32, dtype=torch.float64))
    for hop in model.hops:
        state, logits_BTV = hop.step(torch.arange(8)[None], state)
        assert 1 < state.hidden_BTD.abs().max() < 6_000
        assert logits_BTV.isfinite().all()


@pytest.mark.parametrize(("blocks", "positions"), [(1, 1), (3, 1), (3, 30)])
async def test_the_cost_of_sweeps(blocks: int, positions: int) -> None:
    """30 positions are more than the window has, so they travel in two pieces."""
    hops = LogicalModel(run_of(blocks=blocks), torch.float32).generate().hops
    costs = await time_sweeps(hops, positions, 2)
    assert len(costs) == 2
    states = 2 * (blocks - 1) * positions * 2 * 32
    for cost in costs:
        assert len(cost.hop_seconds) == blocks and min(cost.hop_seconds) > 0
        assert cost.seconds == pytest.approx(cost.rest + sum(cost.hop_seconds))
        # Of two pieces one hop may compute the second while the next computes the first.
        assert cost.rest > 0 or positions > 1
        assert states < cost.bytes < states + 1000 * (blocks + 1)
    assert abs(costs[0].bytes - costs[1].bytes) < 20


async def test_a_silent_chain_is_lost_after_the_time_it_was_given(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    route = (await swarm.chain()).route
    chain = await RemoteChain.open(swarm.run, route, swarm.network.dial, Generation(), silence=0.05)
    for link in swarm.network.dialled:
        link.silence = True
    with pytest.raises(ChainLost) as lost:
        await chain.sweep(0, b"The")
    assert lost.value.code is ErrorCode.TIMED_OUT
    await chain.close()
