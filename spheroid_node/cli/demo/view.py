"""What the demo shows while it trains: a live view on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from spheroid_node.cli.live import duration, render

if TYPE_CHECKING:
    from spheroid_node.node.snapshot import Snapshot

log = structlog.get_logger()


class View(Protocol):
    """A context manager; ``phase`` says in a few words what the demo is at."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, text: str) -> None: ...

    def show(self, snapshot: Snapshot, curve: Sequence[float], seconds_left: float | None) -> None: ...


def view_for(console: Console) -> View:
    """The view that fits where ``console`` writes."""
    return LiveView(console) if console.is_terminal else LineView()


class LiveView:
    """Redraws itself in place, and leaves its last state on the screen."""

    def __init__(self, console: Console) -> None:
        self._phase = Text("starting")
        self._console = console
        self._live = Live(self._phase, console=console, refresh_per_second=4)
        self._body: RenderableType | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, text: str) -> None:
        self._phase = Text(text, style="bold cyan")
        self._redraw()

    def show(self, snapshot: Snapshot, curve: Sequence[float], seconds_left: float | None) -> None:
        if seconds_left is None:  # a table of what has yet to come would only alarm
            return
        self._phase = Text(f"training, {duration(seconds_left)} left", style="bold cyan")
        self._body = render(snapshot, curve)
        self._redraw()

    def _redraw(self) -> None:
        if self._live.is_started:
            self._live.update(Group(self._body, self._phase) if self._body else self._phase)
        else:
            self._console.print(self._phase)


class LineView:
    """A log line a phase and a round."""

    def __init__(self) -> None:
        self._round: int | None = None
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr.flush()

    def phase(self, text: str) -> None:
        if text != self._phase:
            log.info("demo.phase", doing=text)
        self._phase = text

    def show(self, snapshot: Snapshot, curve: Sequence[float], seconds_left: float | None) -> None:
        if seconds_left is None or snapshot.round == self._round:
            return
        self._round = snapshot.round
        log.info(
            "demo.round",
            round=snapshot.round,
            replicas=len(snapshot.replicas),
            versions={group: newest.version for group, newest in snapshot.versions.items()},
            ce=round(curve[-1], 3) if curve else None,
            tokens_per_second=round(snapshot.total("tokens_per_second")),
            accepted=int(snapshot.total("accepted")),
            late=int(snapshot.total("late")),
            refused=int(snapshot.total("refused")),
            bytes_in=int(snapshot.total("bytes_in")),
            bytes_out=int(snapshot.total("bytes_out")),
            seconds_left=round(seconds_left),
        )
