"""A group's parameters as one vector, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spheroid_node.model.composed import Hop
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import (
    build_group,
    elements,
    flatten,
    group_module,
    joined,
    named_tensors,
    part_of_whole,
    shapes,
    unflatten_,
    vector_of,
)
from spheroid_node.run import RunSpec
from tests.model.conftest import DENOISERS, MIXERS, MakeRun, version_0


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("denoiser", DENOISERS)
def test_round_trips(make_run: MakeRun, mixer: str, denoiser: str) -> None:
    run = make_run(mixer=mixer, denoiser=denoiser)
    for number, group in enumerate(run.groups):
        module = build_group(run, group)
        vector = np.arange(elements(run, group), dtype=np.float32) + number
        unflatten_(module, vector)
        assert np.array_equal(flatten(module), vector)
        named = named_tensors(run, group, vector)
        assert np.array_equal(vector_of(run, group, named), vector)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.detach(), torch.from_numpy(named[name].copy())), name
        assert {name: tensor.shape for name, tensor in named.items()} == shapes(run, group)
        assert initial_vector(run, group).shape == vector.shape


def test_a_vector_is_a_copy(run: RunSpec) -> None:
    module = build_group(run, "interface")
    vector = np.zeros(elements(run, "interface"), dtype=np.float32)
    unflatten_(module, vector)
    vector += 1
    assert not flatten(module).any()
    flatten(module)[:] = 2
    assert not flatten(module).any()


def test_what_does_not_fit_is_refused(run: RunSpec) -> None:
    module, vector = build_group(run, "block-0"), initial_vector(run, "block-0")
    before = flatten(module)
    with pytest.raises(ValueError, match="shape"):
        unflatten_(module, vector[:-1])
    assert np.array_equal(flatten(module), before)
    with pytest.raises(ValueError, match="block-0"):
        named_tensors(run, "block-0", vector[:-1])
    named = named_tensors(run, "block-0", vector)
    with pytest.raises(ValueError, match=r"out_norm\.weight"):
        vector_of(run, "block-0", {**named, "out_norm.weight": vector[:3]})
    del named["out_norm.weight"]
    with pytest.raises(ValueError, match=r"out_norm\.weight"):
        vector_of(run, "block-0", named)


@pytest.mark.parametrize("group", ["block-2", "head", ""])
def test_unknown_groups(run: RunSpec, group: str) -> None:
    with pytest.raises(ValueError, match="group"):
        build_group(run, group)
    with pytest.raises(ValueError, match="group"):
        group_module(version_0(run), group)


def test_a_hop_holds_its_own_block_and_the_interface(run: RunSpec) -> None:
    hop = Hop(run, 1)
    assert group_module(hop, "block-1") is hop.block
    assert group_module(hop, "interface") is hop.interface
    with pytest.raises(ValueError, match="block-0"):
        group_module(hop, "block-0")


def test_hops_of_a_model_share_its_parameters(run: RunSpec) -> None:
    model = version_0(run)
    for index in range(2):
        assert model.hop(index).block is group_module(model, f"block-{index}")
        assert model.hop(index).interface is model.interface


def test_shards_are_nearly_equal_parts_of_their_whole(make_run: MakeRun) -> None:
    whole, cut = make_run(denoiser="edm"), make_run(denoiser="edm", round={"shards": 7})
    for name in whole.groups:
        groups, vector = cut.shards_of(name), initial_vector(whole, name)
        sizes = [elements(cut, group) for group in groups]
        assert max(sizes) - min(sizes) <= 1
        assert elements(cut, name) == sum(sizes) == len(vector)
        shards = {group: initial_vector(cut, group) for group in groups}
        assert [len(shard) for shard in shards.values()] == sizes
        assert np.array_equal(joined(cut, shards)[name], vector)
        assert np.array_equal(initial_vector(cut, name), vector)
        for group, shard in shards.items():
            assert np.array_equal(vector_of(cut, group, named_tensors(cut, group, shard)), shard)
    with pytest.raises(ValueError, match=r"block-0\.7"):
        elements(cut, "block-0.7")
    with pytest.raises(ValueError, match=r"block-0\.0"):
        elements(whole, "block-0.0")


@pytest.mark.parametrize("matrices", [torch.float32, torch.float16])
def test_a_shard_is_set_without_touching_the_others(make_run: MakeRun, matrices: torch.dtype) -> None:
    run = make_run(round={"shards": 5})
    module = build_group(run, "block-1").to(matrices)
    unflatten_(module, np.zeros(elements(run, "block-1"), dtype=np.float32))
    part, size = part_of_whole(run, "block-1.2"), elements(run, "block-1.2")
    vector = np.arange(size, dtype=np.float32) % 1000 + 1
    unflatten_(module, vector, part)
    assert np.array_equal(flatten(module, part), vector)
    after = flatten(module)
    assert np.array_equal(after[part], vector)
    assert not after[: part.start].any() and not after[part.stop :].any()
    with pytest.raises(ValueError, match="shape"):
        unflatten_(module, vector[:-1], part)
