"""The demo's run: the shape of bootstrap/runs/demo.toml, its rounds counted from now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from spheroid_node.run import DataSpec, ModelSpec, RoundSpec, RunSpec, TrainingSpec

WIKITEXT = "wikitext-2"


def demo_run(genesis: float, data: Sequence[str] = ()) -> RunSpec:
    """A run whose round 0 begins at ``genesis``, and whose text is at the paths ``data``, if any."""
    name = "python-docs" if not data else WIKITEXT if list(data) == [WIKITEXT] else "your text"
    return RunSpec(
        name="demo",
        seed=1,
        model=ModelSpec(blocks=3, layers=2, width=96, heads=4, window=64),
        training=TrainingSpec(local_steps=500, batch=16),
        round=RoundSpec(genesis=genesis, period=10.0, settle=2.0),
        data=DataSpec(name=name),
    )


def to_toml(run: RunSpec) -> str:
    """A run file that reads back as ``run``."""
    fields = run.model_dump(mode="json")
    plain = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    lines = [_line(name, value) for name, value in plain.items()]
    for name, section in fields.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(_line(key, value) for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    # JSON writes the strings, numbers and lists of a run exactly as TOML does.
    return f"{name} = {json.dumps(value)}"
