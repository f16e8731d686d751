"""What every benchmark writes: results/NAME.json, in one form."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PLACES = {"--data": "DATA", "--models": "MODELS"}
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Found:
    """Rows of a table, and what of them is a headline."""

    rows: list[dict[str, Any]]
    headline: dict[str, float]


def machine() -> str:
    """The machine in a line: processor, cores, system, Python and PyTorch."""
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def write_result(
    name: str,
    seeds: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    headline: Mapping[str, float | Mapping[str, float]],
) -> Path:
    """Write results/``name``.json with the command that made it. Returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    result = {
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "seeds": list(seeds),
        "rows": list(rows),
        "headline": dict(headline),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _command() -> str:
    """What was typed; where things lie on this machine is nobody's concern."""
    words = [PLACES.get(before, word) for before, word in itertools.pairwise(["", *sys.argv[1:]])]
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])
