"""Puts the tables of results/*.json into docs/results.md, so that no figure there is typed by hand.

    python -m benchmarks.tables

In the page a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and takes the place of what
was between them.
"""

from __future__ import annotations

import json
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


def by_block(row: Row) -> str:
    return " → ".join(f"{value:.3f}" for value in row["ce_by_block"])


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
    "step": {
        "one thread": lambda row: str(row["what"]),
        "a step": lambda row: f"{row['step_ms']:.1f} ms",
        "tokens/s": plain("tokens_per_s"),
    },
    "simulate": {
        "workers": plain("workers"),
        "a round": lambda row: f"{row['seconds_a_round']:.2f} s",
        "all rounds": lambda row: f"{row['seconds']:.1f} s",
    },
}


def table(name: str) -> str:
    """Markdown of a result's rows."""
    columns = TABLES[name]
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[column(row) for column in columns.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str) -> str:
    """The page with every table anew."""
    return MARKED.sub(lambda found: found[1] + table(found[2]) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
