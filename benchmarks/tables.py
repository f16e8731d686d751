"""Puts the tables of results/*.json into docs/results.md, so that no figure there is typed by hand.

    python -m benchmarks.tables

In the page a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and takes the place of what
was between them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

PAGE = Path(__file__).parents[1] / "docs/results.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Mapping[str, Any]
Column = Callable[[Row], str]


def ce(row: Row) -> str:
    return f"{row['ce']:.3f} ± {row['ce_sd']:.3f}" if row["seeds"] > 1 else f"{row['ce']:.3f}"


def megabytes(field: str) -> Column:
    return lambda row: f"{row[field] / 1e6:,.1f} MB"


def plain(field: str, digits: int = 0) -> Column:
    return lambda row: f"{row[field]:,.{digits}f}"


def measured(field: str, unit: str = "", scale: float = 1.0) -> Column:
    """Three digits at least."""

    def column(row: Row) -> str:
        value = row[field] * scale
        digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
        return f"{value:,.{max(0, digits)}f} {unit}".rstrip()

    return column


def by_block(row: Row) -> str:
    return " → ".join(f"{value:.3f}" for value in row["ce_by_block"])


WAYS = {
    "streams": "a bare TLS socket, read as asyncio's streams do",
    "protocol": "a bare TLS socket, without streams",
    "ours": "the transfer service",
}

ARM: dict[str, Column] = {"": lambda row: str(row["arm"]), "CE": ce}
TABLES: dict[str, dict[str, Column]] = {
    "recipes": ARM
    | {
        "after each block": by_block,
        "mean of all": plain("ce_mean_log_probs", 3),
        "mean of the last two": plain("ce_last_two", 3),
        "seeds": plain("seeds"),
    },
    "sigma": ARM
    | {"after each block": by_block, "what the last block's loss sees": plain("ce_local_posterior_last", 3)},
    "depth": ARM
    | {
        "after each block": by_block,
        "parameters and AdamW of a worker": lambda row: f"{row['worker_state_mb']:.1f} MB",
        "activations": lambda row: f"{row['worker_activations_mb']:.1f} MB",
    },
    "mixers": ARM | {"after each block": by_block, "parameters": plain("parameters")},
    "precision": ARM | {"after each block": by_block},
    "regimes": ARM
    | {
        "participation": lambda row: f"{row['participation']:.0%}",
        "moved": megabytes("bytes_moved"),
        "virtual time": lambda row: f"{row['virtual_seconds'] / 60:.0f} min",
    },
    "replicas": ARM | {"rounds": plain("rounds"), "moved": megabytes("bytes_moved")},
    "methods": ARM
    | {
        "moved by a worker": megabytes("bytes_a_worker"),
        "parameters and AdamW of a worker": lambda row: f"{row['state_mb']:.1f} MB",
        "activations": lambda row: f"{row['activations_mb']:.1f} MB",
        "arithmetic in all": lambda row: f"{row['flops_total'] / 1e12:.0f} TFLOP",
    },
    "hostile": {
        "rule": lambda row: str(row["rule"]),
        "of six workers": lambda row: f"{row['hostile']} {row['attack']}" if row["hostile"] else "all honest",
        "CE": lambda row: f"{row['ce']:,.3f}",
        "worse than honest by": lambda row: f"{row['delta']:,.3f}",
    },
    "recovery": {
        "killed": lambda row: f"{row['phase_s']:.1f} s into its slot",
        "the group's next version": lambda row: f"after {row['next_version_s']:.1f} s",
        "the worker trains again": lambda row: f"{row['trains_again_s']:.1f} s after its start",
    },
    "chaos": {
        "fault": lambda row: str(row["kind"]),
        "times": plain("count"),
        "healed in": lambda row: f"{row['healed_median_s']:.1f} s",
        "at worst": lambda row: f"{row['healed_worst_s']:.1f} s",
        "never": plain("unhealed"),
    },
    "soak": {
        "": lambda row: str(row["role"]),
        "long lives": plain("lives"),
        "the longest": lambda row: f"{row['longest_min']:.0f} min",
        "resident memory": lambda row: f"{row['rss_mb']:,.0f} MB",
        "grew by at most": lambda row: f"{row['rss_growth_ratio'] - 1:.1%}",
        "open descriptors": plain("descriptors"),
        "grew by": plain("fd_growth"),
    },
    "aggregation_updates": {
        "update": lambda row: f"{row['update_mb']:.0f} MB, {row['dtype']}",
        "rule": lambda row: str(row["rule"]),
        "workers": plain("workers"),
        "MB/s": plain("mb_per_s"),
        "numpy's mean": lambda row: f"{row['numpy_mb_per_s']:,.0f} MB/s",
        "memory at most": lambda row: f"{row['peak_mb']:,.0f} MB",
    },
    "aggregation_transfer": {
        "200 MB by": lambda row: WAYS[row["way"]],
        "MB/s": plain("mb_per_s"),
    },
    "aggregation_shards": {
        "shards": plain("shards"),
        "updates a round": plain("updates_a_round"),
        "aggregators": plain("aggregators"),
        "the busiest peer moves": lambda row: f"{row['busiest_peer_mb']:,.0f} MB",
        "the mean peer": lambda row: f"{row['mean_peer_mb']:,.1f} MB",
        "a round takes": lambda row: f"{row['seconds_a_round']:.1f} s",
    },
    "slot_effect": {
        "": lambda row: str(row["arm"]),
        "CE": ce,
        "tokens a layer": plain("tokens"),
    },
    "slot_share": {
        "worker": lambda row: str(row["worker"]),
        "from update to update": lambda row: f"{row['slot_s']:.1f} s",
        "of these trained": lambda row: f"{row['trained_s']:.1f} s",
        "share": lambda row: f"{row['share']:.1%}",
        "steps": plain("steps"),
    },
    "serving_drafts": {
        "read-out": lambda row: str(row["readout"]),
        "temperature": plain("temperature", 1),
        "branches": lambda row: f"{row['branches']} at most" if row["branches"] else "none",
        "bytes a sweep": plain("bytes_per_sweep", 2),
        "the same text": lambda row: f"{row['identical']} of {row['texts']}",
    },
    "serving_delays": {
        "delay of a link": lambda row: f"{1000 * row['delay']:.0f} ms",
        "decoder": lambda row: str(row["decoder"]),
        "128 bytes in": lambda row: f"{row['seconds']:.3f} s",
        "times as fast": plain("speedup", 1),
        "sweeps": lambda row: f"{row['sweeps']:.0f}" if "sweeps" in row else "128",
        "CE of the text": lambda row: f"{row['ce']:.2f}" if "ce" in row else "",
    },
    "serving_one_sweep": {
        "": lambda row: str(row["what"]),
        "temperature": plain("temperature", 1),
        "CE of the text": plain("ce", 2),
        "of its first 8 bytes": plain("ce_first_8", 2),
        "of its first": plain("ce_first", 2),
    },
    "serving_hop": {
        "": lambda row: str(row["what"]),
        "there and back": lambda row: f"{row['ms']:.3f} ms",
        "without a computation of": lambda row: f"{row['compute_ms']:.2f} ms",
    },
    "serving_failover": {
        "trials": plain("trials"),
        "median pause": lambda row: f"{row['median_s']:.2f} s",
        "worst": lambda row: f"{row['worst_s']:.2f} s",
        "the same text": plain("identical"),
    },
    "serving_sessions": {
        "sessions": plain("sessions"),
        "bytes/s in all": plain("bytes_per_s"),
        "slowest over mean": plain("worst_over_mean", 2),
        "memory of a hop": lambda row: f"{row['memory_mb']:,.0f} MB",
    },
    "step": {
        "one thread": lambda row: str(row["what"]),
        "a step": lambda row: f"{row['step_ms']:.1f} ms",
        "tokens/s": plain("tokens_per_s"),
    },
    "logical": {
        "width": plain("width"),
        "parameters": measured("parameters", "B", 1e-9),
        "stored": measured("stored_bytes", "GB", 1e-9),
        "positions a sweep": plain("positions"),
        "sweeps/s": measured("sweeps_per_s"),
        "frames": measured("mb_per_s", "MB/s"),
        "a hop computes": measured("compute_seconds", "ms", 1e3),
        "transport and scheduling of a hop": measured("rest_seconds", "ms", 1e3),
    },
    "simulate": {
        "workers": plain("workers"),
        "a round": lambda row: f"{row['seconds_a_round']:.2f} s",
        "all rounds": lambda row: f"{row['seconds']:.1f} s",
    },
}


def table(name: str) -> str:
    """Markdown of a result's rows; ``serving_delays`` are those of ``serving`` that say so."""
    columns = TABLES[name]
    result, _, part = name.partition("_")
    rows = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if not part or row["table"] == part]
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[column(row) for column in columns.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str) -> str:
    """The page with every table anew."""
    return MARKED.sub(lambda found: found[1] + table(found[2]) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
