"""What a generation cost: sweeps, bytes, time a hop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from spheroid_node.serving.chain import Chain, Sweep


@dataclass
class GenerationStats:
    """Counts of one generation; times are in seconds from its start."""

    sweeps: int = 0
    """Traversals of the chain; a line of drafts costs one, in however many pieces it travels."""
    bytes: int = 0
    hop_seconds: list[float] = field(default_factory=list)
    """Compute time of each hop, all sweeps together."""
    first_byte: float | None = None
    total: float = 0.0
    _line: int = -1

    def add(self, sweep: Sweep, elapsed: float) -> None:
        """Count ``sweep``, which was complete ``elapsed`` seconds after the start."""
        self.sweeps += sweep.line < 0 or sweep.line != self._line
        self._line = sweep.line
        self.bytes += len(sweep.tokens)
        self.hop_seconds += [0.0] * (len(sweep.seconds) - len(self.hop_seconds))
        for hop, seconds in enumerate(sweep.seconds):
            self.hop_seconds[hop] += seconds
        self.first_byte = elapsed if self.first_byte is None else self.first_byte
        self.total = elapsed

    @property
    def bytes_per_sweep(self) -> float:
        return self.bytes / self.sweeps if self.sweeps else 0.0

    @property
    def seconds_per_hop(self) -> list[float]:
        """Mean compute time of a sweep at each hop."""
        return [seconds / self.sweeps for seconds in self.hop_seconds]

    def lines(self) -> list[str]:
        """The statistics for a person, a fact a line."""
        speed = f", {self.bytes / self.total:.1f} bytes/s" if self.total else ""
        first = "" if self.first_byte is None else f", the first after {self.first_byte:.2f} s"
        hops = " · ".join(f"{1000 * seconds:.1f}" for seconds in self.seconds_per_hop)
        return [
            f"{self.bytes} bytes in {self.total:.2f} s{speed}{first}",
            f"{self.sweeps} sweeps, {self.bytes_per_sweep:.2f} bytes a sweep",
            f"compute a hop and sweep: {hops or '–'} ms",
        ]


class Measure:
    """Counts what the chains of one text do, in :attr:`stats`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stats = GenerationStats()
        self._clock = clock
        self._began = clock()

    def chain(self, chain: Chain) -> Chain:
        """``chain``, counted."""
        return _MeasuredChain(chain, self)

    def add(self, sweep: Sweep) -> None:
        self.stats.add(sweep, self._clock() - self._began)


class _MeasuredChain:
    def __init__(self, chain: Chain, measure: Measure) -> None:
        self._chain, self._measure = chain, measure

    async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
        sweep = await self._chain.sweep(position, tokens, masked, decide)
        self._measure.add(sweep)
        return sweep

    async def write(self, position: int, tokens: bytes, count: int, drafts: int = 0) -> AsyncIterator[Sweep]:
        async for sweep in self._chain.write(position, tokens, count, drafts):
            self._measure.add(sweep)
            yield sweep

    async def close(self) -> None:
        await self._chain.close()
