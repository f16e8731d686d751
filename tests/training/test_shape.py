from __future__ import annotations

import pytest
from pydantic import ValidationError

from spheroid_node.model.composed import ComposedModel
from spheroid_node.training.plan import total_elements
from spheroid_node.training.shape import run_of_shape


@pytest.mark.parametrize(
    ("parameters", "blocks"),
    [(75_800_000_000, 24), (175_000_000_000, 96), (7_000_000_000, 32), (124_000_000, 12), (1_000_000, 3)],
)
def test_the_number_of_parameters_is_met(parameters: int, blocks: int) -> None:
    run = run_of_shape(parameters, blocks)
    assert total_elements(run) == pytest.approx(parameters, rel=0.01)
    assert run.model.blocks == blocks


def test_large_shapes_are_as_wide_as_the_rule_says() -> None:
    for parameters, blocks in ((75_800_000_000, 24), (175_000_000_000, 96)):
        model = run_of_shape(parameters, blocks).model
        assert 64 < model.width / (model.blocks * model.layers) < 256
        assert model.width % 128 == 0
        assert model.width // model.heads == 128


def test_it_is_counted_in_modules() -> None:
    run = run_of_shape(300_000, 3)
    assert sum(p.numel() for p in ComposedModel(run).parameters()) == pytest.approx(300_000, rel=0.01)


def test_what_is_given_is_kept() -> None:
    run = run_of_shape(38_600_000, 3, width=512, heads=16, window=256, batch=3)
    assert (run.model.width, run.model.layers, run.model.heads) == (512, 4, 16)
    assert (run.model.window, run.training.batch) == (256, 3)
    run = run_of_shape(38_600_000, 3, layers=2)
    assert run.model.layers == 2
    assert total_elements(run) == pytest.approx(38_600_000, rel=0.01)


def test_heads_divide_the_width_that_is_chosen() -> None:
    model = run_of_shape(50_000_000, 3, heads=6).model
    assert model.heads == 6
    assert model.width % 12 == 0


@pytest.mark.parametrize(("width", "head_width"), [(96, 32), (256, 128), (384, 128)])
def test_heads_are_128_wide_or_as_wide_as_the_width_allows(width: int, head_width: int) -> None:
    deep = run_of_shape(3 * 64 * 12 * width**2, 3, width=width).model
    assert deep.width // deep.heads == head_width


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"parameters": 1000, "blocks": 24}, "width 2 and 1 layers"),
        ({"parameters": 10**15, "blocks": 3}, "width 32768 and 256 layers"),
        ({"parameters": 75_800_000_000, "blocks": 24, "width": 9344}, "width 9344 and 3 layers"),
        ({"parameters": 38_600_000, "blocks": 3, "width": 512, "layers": 3}, "width 512 and 3 layers"),
    ],
)
def test_what_comes_nearest_is_said(arguments: dict[str, int], nearest: str) -> None:
    with pytest.raises(
        ValueError, match=f"no such shape of {arguments['blocks']} blocks .* nearest is {nearest}"
    ):
        run_of_shape(**arguments)


@pytest.mark.parametrize(
    "wrong", [{"blocks": 0}, {"blocks": 3, "width": 10, "heads": 3}, {"blocks": 3, "layers": 257}]
)
def test_what_no_run_can_have_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        run_of_shape(1_000_000, **wrong)
