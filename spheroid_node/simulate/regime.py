"""Regimes: what machines and links a simulated swarm has, and what befalls them in a round.

A regime says nothing about who takes part. It draws machines, and in every round who is away and whose link
stalls; whether an update makes the deadline is then for the clock and the code of rounds/ to decide.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from math import ceil, exp, inf
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spheroid_node.model.randomness import stream
from spheroid_node.run import RunSpec, describe

Positive = Annotated[float, Field(gt=0)]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Regime(BaseModel):
    """Distributions of machines, links and mishaps. Spreads are standard deviations of the logarithm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    speed: PositiveFinite = 1.5
    """Times that the median machine could train the run's local_steps between the start of a slot and τ."""
    speed_spread: NonNegative = 0.0
    latency: NonNegative = 0.0
    """Of the median link, seconds each way."""
    bandwidth: Positive = inf
    """Of the median link, bytes a second, up as down."""
    link_spread: NonNegative = 0.0
    """Of bandwidth and, the other way round, of latency: what is slow is slow in both."""
    stall: Probability = 0.0
    """Chance in a round that a link stands still while the updates are on their way."""
    stall_slots: PositiveFinite = 1.0
    """Median length of such a stall, in slots."""
    stall_spread: NonNegative = 0.5
    away: Probability = 0.0
    """Chance that a machine is away for a round: it neither trains nor collects. The others wait for it."""
    deadline: Annotated[float, Field(gt=0, lt=1)] | None = None
    """τ as a share of the slot, in place of the run's own."""

    def run_of(self, run: RunSpec) -> RunSpec:
        """``run`` with this regime's deadline."""
        if self.deadline is None:
            return run
        settle = run.round.period * (1 - self.deadline)
        return run.model_copy(update={"round": run.round.model_copy(update={"settle": settle})})

    def machine(self, run: RunSpec, seed: int, index: int) -> Machine:
        """Machine number ``index``; ``run`` is what :meth:`run_of` gave."""
        compute, link = stream(seed, 1, index).standard_normal(2)
        median = (run.round.period - run.round.settle) / (self.speed * run.training.local_steps)
        slower = exp(self.link_spread * link)
        return Machine(
            step_seconds=median * exp(self.speed_spread * compute),
            bytes_per_second=self.bandwidth / slower,
            latency=self.latency * slower,
        )

    def mishaps(self, run: RunSpec, seed: int, round: int, workers: int) -> Mishaps:
        """What happens to each of ``workers`` machines in a round."""
        draws = stream(seed, 3, round)
        away, stalls = draws.random((2, workers))
        length = np.exp(self.stall_spread * draws.standard_normal(workers)) * self.stall_slots
        return Mishaps(away < self.away, np.where(stalls < self.stall, length * run.round.period, 0.0))


@dataclass(frozen=True)
class Machine:
    """How fast a machine computes and sends; latency in seconds each way."""

    step_seconds: float
    bytes_per_second: float = inf
    latency: float = 0.0

    def steps_between(self, begin: float, stop: float) -> int:
        """Steps that begin before ``stop``; the last one is finished."""
        return max(0, ceil((stop - begin) / self.step_seconds))

    def transfer_seconds(self, size: int) -> float:
        return self.latency + size / self.bytes_per_second if size else 0.0


@dataclass(frozen=True)
class Mishaps:
    """Of one round, by machine: shape (workers,)."""

    away: NDArray[np.bool_]
    stall_seconds: NDArray[np.float64]


LOCKSTEP = Regime()

REGIMES: dict[str, Regime] = {
    # Equal machines, links without delay.
    "lockstep": LOCKSTEP,
    # Home machines: links that stall now and then.
    "mild": Regime(
        speed_spread=0.3, latency=0.03, bandwidth=5e6, link_spread=0.4, stall=0.05, away=0.025
    ),
    # Continents apart: many stalls and absences, and machines of all kinds.
    "wan": Regime(
        speed_spread=0.5, latency=0.15, bandwidth=2.5e6, link_spread=0.8, stall=0.37, away=0.2
    ),
    # Links that carry nothing within a slot, slow machines, and a deadline that leaves little room.
    "bad-edge": Regime(
        speed=0.5, speed_spread=0.5, latency=0.5, bandwidth=2.5e5, link_spread=0.8,
        stall=1.0, stall_slots=3.0, stall_spread=0.3, away=0.3, deadline=0.5,
    ),
}  # fmt: skip
"""Calibrated for participation of 100 %, about 90 %, about 42 % and 0 %, as the paper's regimes had, for
runs whose updates take a small part of a slot to send."""


def load_regime(name: str) -> Regime:
    """A regime of this module by name, or one from a TOML file.

    Raises :class:`ValueError` for what is neither, with the names there are, and for a file that cannot be
    read or has a key that is wrong.
    """
    if name in REGIMES:
        return REGIMES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no regime or file {name!r}; the regimes are {', '.join(REGIMES)}")
    try:
        return Regime.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValidationError as error:
        raise ValueError(f"{name}: {describe(error)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}") from error
