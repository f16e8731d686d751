"""How fast a chain writes over slow links, and that its text is the same as one byte a sweep.

    python -m benchmarks.serving --models DIR --data DATA

DIR is what :mod:`benchmarks.serving_models` has written. Everything that is compared runs in turns, in one
run. ``--only`` measures some of the tables; the others stay as they are.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import hop_cost
from benchmarks import serving_tables as tables
from benchmarks.arms import unpack
from benchmarks.report import RESULTS, Found, write_result

PROMPT = 64
"""Bytes of a prompt."""


def prompts(data: Path, count: int) -> list[bytes]:
    """Held-out text from places drawn once and for all."""
    with tempfile.TemporaryDirectory() as folder:
        text = (unpack(data, Path(folder)) / "valid.txt").read_bytes()
    rng = random.Random(0)
    starts = (rng.randrange(len(text) - PROMPT) for _ in range(count))
    return [text[start : start + PROMPT] for start in starts]


TABLES: dict[str, Callable[[argparse.Namespace, list[bytes]], Awaitable[Found]]] = {
    "drafts": tables.drafts,
    "delays": tables.delays,
    "one_sweep": tables.one_sweep,
    "hop": hop_cost.table,
    "failover": tables.failover,
    "sessions": tables.sessions,
}


async def main(asked: argparse.Namespace) -> None:
    path = RESULTS / "serving.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "headline": {}}
    rows: list[dict[str, Any]] = before["rows"]
    headline: dict[str, float] = before["headline"]
    known = prompts(Path(asked.data), asked.prompts)
    for name in asked.only or TABLES:
        found = await TABLES[name](asked, known)
        rows = [row for row in rows if row["table"] != name]
        rows += [{"table": name, **row} for row in found.rows]
        headline |= found.headline
        for row in found.rows:
            print(name, json.dumps(row), flush=True)
        write_result("serving", [0], rows, headline)
    if any(row["table"] == "delays" for row in rows):
        tables.figure(RESULTS / "serving.png", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=40, help="where nothing is timed, a temperature")
    parser.add_argument("--trials", type=int, default=5, help="of each thing that is timed")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=[*TABLES])
    uvloop.run(main(parser.parse_args()))
