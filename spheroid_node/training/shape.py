"""A run of a given number of parameters: the shape that ``plan --params`` chooses.

Of all shapes within 1 % of that number it is the one with the least product of two ratios: that of its width
to 128 for each layer of the whole depth, which the largest dense transformers have (96 layers of 12,288 in
GPT-3), or the inverse; and 128 over the greatest common divisor of width and 128, which kernels like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spheroid_node.run import ModelSpec, RunSpec, TrainingSpec
from spheroid_node.training.plan import total_elements

TOLERANCE = 0.01
"""By how much the number of parameters may miss what was asked."""

WIDTH_PER_LAYER = 128
ALIGNMENT = 128
"""Heads are as wide as this where the width allows."""

MAX_WIDTH = 32_768
MAX_LAYERS = 256
"""Of a block. Both are the bounds of :class:`ModelSpec`."""

Shape = tuple[int, int]
"""Width, and layers of a block."""


def run_of_shape(
    parameters: int,
    blocks: int,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    window: int = 1024,
    batch: int = 16,
) -> RunSpec:
    """A run whose composed model has ``parameters``, within 1 %; ``layers`` are those of a block.

    Raises :class:`ValueError` where no shape fits, and says what comes nearest; pydantic's, which is one, for
    sizes that no run can have.
    """
    _run(blocks, (width or 2 * (heads or 1), layers or 1), heads, window, batch)  # can it be, what was given?
    shape = _choose(_Counts(blocks), parameters, width, layers, heads)
    return _run(blocks, shape, heads, window, batch)


def _run(blocks: int, shape: Shape, heads: int | None, window: int, batch: int) -> RunSpec:
    width, layers = shape
    heads = heads or width // math.gcd(width, ALIGNMENT)
    model = ModelSpec(blocks=blocks, layers=layers, width=width, heads=heads, window=window)
    return RunSpec(name="planned", model=model, training=TrainingSpec(batch=batch))


class _Counts:
    """Parameters by shape: a polynomial of degree 2 in the width, 1 in the layers, which six models fix."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._of = {
            (width, layers): total_elements(_run(blocks, (width, layers), 1, 2, 1))
            for width in (2, 4, 6)
            for layers in (1, 2)
        }

    def __call__(self, shape: Shape) -> int:
        width, layers = shape
        shallow, deep = self._at(width, 1), self._at(width, 2)
        return shallow + (layers - 1) * (deep - shallow)

    def depths_near(self, parameters: int, width: int) -> tuple[int, int]:
        """The numbers of layers with which a width comes nearest, from below and from above."""
        shallow, deep = self._at(width, 1), self._at(width, 2)
        below = 1 + (parameters - shallow) // (deep - shallow)
        return max(1, min(below, MAX_LAYERS)), max(1, min(below + 1, MAX_LAYERS))

    def _at(self, width: int, layers: int) -> int:
        """By Newton's forward differences over widths 2, 4, 6: exact, since widths are even."""
        first, second, third = (self._of[at, layers] for at in (2, 4, 6))
        step = width // 2 - 1
        return first + step * (second - first) + step * (step - 1) // 2 * (third - 2 * second + first)


def _choose(
    count: _Counts, parameters: int, width: int | None, layers: int | None, heads: int | None
) -> Shape:
    def miss(shape: Shape) -> int:
        return abs(count(shape) - parameters)

    def oddity(shape: Shape) -> float:
        stretch = shape[0] / (count.blocks * shape[1] * WIDTH_PER_LAYER)
        return max(stretch, 1 / stretch) * ALIGNMENT / math.gcd(shape[0], ALIGNMENT)

    shapes = list(_shapes(count, parameters, width, layers, heads))
    fitting = [shape for shape in shapes if miss(shape) <= TOLERANCE * parameters]
    if fitting:
        return min(fitting, key=oddity)
    nearest = min(shapes, key=miss)
    raise ValueError(
        f"no such shape of {count.blocks} blocks has {parameters:,} parameters; what comes nearest is width "
        f"{nearest[0]} and {nearest[1]} layers a block, with {count(nearest):,}"
    )


def _shapes(
    count: _Counts, parameters: int, width: int | None, layers: int | None, heads: int | None
) -> Iterator[Shape]:
    """Every shape worth a look: all widths that are allowed, each with the depths that come nearest."""
    step = 2 * (heads or 1)
    for candidate in range(step, MAX_WIDTH + 1, step) if width is None else (width,):
        for depth in count.depths_near(parameters, candidate) if layers is None else (layers,):
            yield candidate, depth
        if count((candidate, 1)) > 2 * parameters:
            return
