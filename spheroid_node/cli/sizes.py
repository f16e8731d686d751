"""Sizes as people write them, such as 75.8B, and the run that a size becomes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from spheroid_node.run import RunSpec

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def quantity(_ctx: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Callback of an option for a number of parameters such as 124M or 75.8B. Decimal units."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", value.strip().upper())
    if not found:
        raise click.BadParameter(f"{value!r} is not a number of parameters, such as 124M or 75.8B")
    return int(Decimal(found[1]) * UNITS[found[2]])


def decimal(number: int, unit: str = "") -> str:
    """Four digits, and a decimal unit: bytes as kB, MB, GB, parameters as K, M, B."""
    prefixes = ("", "k", "M", "G", "T") if unit else ("", "K", "M", "B", "T")
    power = min((len(str(number)) - 1) // 3, len(prefixes) - 1)
    value = number / 1000**power
    decimals = max(0, 4 - len(str(int(value)))) if power else 0
    return f"{value:,.{decimals}f} {prefixes[power]}{unit}".rstrip()


def run_of_size(parameters: int, blocks: int, **shape: int) -> RunSpec:
    """:func:`spheroid_node.training.shape.run_of_shape`. Raises :class:`click.UsageError` where none fits."""
    from pydantic import ValidationError

    from spheroid_node.run import describe
    from spheroid_node.training.shape import run_of_shape

    try:
        return run_of_shape(parameters, blocks, **shape)
    except ValidationError as error:
        raise click.UsageError(describe(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
