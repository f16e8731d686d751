"""Draws a Snapshot for a terminal: the one renderer of ``status`` and ``demo``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spheroid_node.run import block_group

if TYPE_CHECKING:
    from spheroid_node.node.snapshot import Replica, Snapshot

BARS = "▁▂▃▄▅▆▇█"


def render(snapshot: Snapshot, curve: Sequence[float] = ()) -> RenderableType:
    """The whole view; ``curve`` is the from-noise CE of the rounds so far, in order."""
    parts: list[RenderableType] = [headline(snapshot), replica_table(snapshot)]
    if curve:
        parts.append(curve_line(curve))
    parts.append(totals_lines(snapshot))
    parts += [
        Text(f"Block {block} has no live replica: nobody can be answered until one joins.", style="bold red")
        for block in snapshot.missing
    ]
    parts += [
        Text(f"{short_peer(replica.peer)} (block {replica.block}): {replica.note}", style="yellow")
        for replica in snapshot.replicas
        if replica.note
    ]
    return Group(*parts)


def headline(snapshot: Snapshot) -> Text:
    """Run, round, and how long the round still takes updates."""
    left = snapshot.seconds_to_deadline
    clock = f"deadline in {duration(left)}" if left >= 0 else "settling"
    text = Text.assemble(
        (snapshot.run.name, "bold"), f" {snapshot.run.run_id} · round {snapshot.round} · {clock}"
    )
    if snapshot.from_noise_ce is not None:
        text.append(f" · from-noise CE {snapshot.from_noise_ce:.3f}")
    return text


def replica_table(snapshot: Snapshot) -> Table:
    """A row for each replica, grouped by block; a block without one has a row that says so.

    ``updates`` are accepted/late/refused, as the line below the table spells out. It fits 80 columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="dim")
    table.add_column("block", justify="right")
    table.add_column("replica", no_wrap=True)
    for name in ("version", "steps", "tokens/s", "loss", "CE", "updates", "led", "in", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    for block in range(snapshot.run.model.blocks):
        replicas = snapshot.of_block(block)
        if not replicas:
            table.add_row(str(block), "MISSING", style="bold red")
        for index, replica in enumerate(replicas):
            table.add_row(str(block) if index == 0 else "", *_cells(snapshot, replica))
    return table


def _cells(snapshot: Snapshot, replica: Replica) -> Iterable[str]:
    announced = snapshot.versions.get(block_group(replica.block))
    return (
        short_peer(replica.peer) + ("" if replica.state == "online" else f" {escape(replica.state)}"),
        str(replica.version),
        str(announced.steps) if announced else "–",
        f"{replica.tokens_per_second:,.0f}",
        _nats(replica.train_loss),
        _nats(replica.from_noise_ce),
        f"{replica.accepted}/{replica.late}/{replica.refused}",
        str(replica.led),
        size(replica.bytes_in),
        size(replica.bytes_out),
    )


def curve_line(curve: Sequence[float]) -> Text:
    """From-noise CE by round as a sparkline, with its first and newest value."""
    return Text.assemble(
        "CE by round ", (sparkline(curve), "green"), f" {curve[0]:.3f} → {curve[-1]:.3f} nats a byte"
    )


def totals_lines(snapshot: Snapshot) -> Text:
    """The swarm as a whole."""
    return Text(
        f"{len(snapshot.replicas)} replicas · {snapshot.total('tokens_per_second'):,.0f} tokens/s · "
        f"{size(snapshot.total('bytes_in'))} in, {size(snapshot.total('bytes_out'))} out\n"
        f"updates {snapshot.total('accepted'):.0f} accepted, {snapshot.total('late'):.0f} late, "
        f"{snapshot.total('refused'):.0f} refused"
    )


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """One bar a value, the lowest value the lowest bar; only the last ``width`` values are drawn."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((value - low) / step)] for value in shown)


def size(count: float) -> str:
    """A number of bytes with three digits and its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{1 if count < 100 else 0}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people: ``8 s``, ``2 min 5 s``, ``3 h 4 min``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def short_peer(peer: str) -> str:
    """The end of a peer id: all Ed25519 ids begin with the same letters."""
    return f"…{peer[-8:]}"


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
