"""The live line of ``join`` on a terminal: it reads the node's own log events.

Routine events only change the line; the rest is printed above it.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

import structlog
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from structlog.typing import EventDict, WrappedLogger

from spheroid_node.cli.live import size

ROUTINE = frozenset(
    {
        "trainer.started",
        "round.trained",
        "round.receipt",
        "round.version",
        "round.led",
        "round.evaluated",
        "node.traffic",
    }
)


class StatusLine:
    """A context manager; ``hear`` is the structlog listener that feeds it."""

    def __init__(self, *, shown: bool) -> None:
        self._facts: dict[str, Any] = {}
        self._verdicts: dict[str, int] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = (
            Live(self._drawn(), console=Console(file=sys.stderr), refresh_per_second=4, transient=True)
            if shown
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def hear(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """Take what the line shows from ``event``; drop routine events where the line is shown."""
        self._learn(event)
        if self._live and event.get("event") == "node.leaving":
            # A second Ctrl-C ends the process at once, and would leave the terminal without a cursor.
            self._live.stop()
            self._live = None
        if self._live:
            self._live.update(self._drawn())
        if self._live and event.get("event") in ROUTINE and event.get("level") == "info":
            raise structlog.DropEvent
        return event

    def _learn(self, event: EventDict) -> None:
        if event.get("event") == "round.receipt":
            verdict = str(event.get("verdict"))
            self._verdicts[verdict] = self._verdicts.get(verdict, 0) + 1
        elif event.get("event") == "round.version" and str(event.get("group", "")).startswith("block-"):
            self._facts["version"] = event.get("version")
        elif event.get("event") in ROUTINE or event.get("event") == "node.started":
            self._facts |= {
                name: event[name]
                for name in ("block", "round", "loss", "tokens_per_second", "ce", "bytes_in", "bytes_out")
                if event.get(name) is not None
            }

    def _drawn(self) -> Table:
        line = Table.grid(padding=(0, 1))
        line.add_column()
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(self._spinner, self.text())
        return line

    def text(self) -> str:
        """The line as it is now."""
        facts = self._facts
        parts = [f"block {facts['block']}" if "block" in facts else "starting"]
        if "round" in facts:
            parts.append(f"round {facts['round']}")
        if "version" in facts:
            parts.append(f"version {facts['version']}")
        if "ce" in facts:
            parts.append(f"CE {_last(facts['ce']):.3f}")
        if "loss" in facts:
            parts.append(f"loss {facts['loss']:.3f}")
        if "tokens_per_second" in facts:
            parts.append(f"{facts['tokens_per_second']:,.0f} tokens/s")
        if self._verdicts:
            parts.append(", ".join(f"{count} {verdict}" for verdict, count in sorted(self._verdicts.items())))
        if "bytes_in" in facts and "bytes_out" in facts:
            parts.append(f"{size(facts['bytes_in'])} in, {size(facts['bytes_out'])} out")
        return " · ".join(parts)


def _last(ce: Any) -> float:
    """CE after the node's own block, where an event names one for every block up to it."""
    return float(ce[-1] if isinstance(ce, list | tuple) else ce)
