"""The model card of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spheroid_node.run import RunSpec

BY_A_SWARM = """trained block by block by a swarm of `spheroid-node`s:
no worker held the whole model, and no gradient crossed from one block to another"""


def model_card(
    run: RunSpec,
    versions: Mapping[str, int],
    evaluation: Mapping[str, Any] | None,
    trained: str = BY_A_SWARM,
) -> str:
    """Markdown that says what the model is, how it was ``trained`` and measured, and how to use it."""
    model, learning, noise = run.model, run.learning, run.noise
    sha256 = f" (SHA-256 {run.data.sha256})" if run.data.sha256 else ""
    measured = "\n".join(f"| {name} | {_number(value)} |" for name, value in (evaluation or {}).items())
    table = f"| measure | value |\n| --- | --- |\n{measured}" if measured else "Not measured at export."
    return f"""# {run.name}

A byte-level language model of {model.blocks} blocks, {trained}.

## Shape

{model.blocks} blocks × {model.layers} causal transformer layers, width {model.width}, {model.heads} heads,
window {model.window} bytes. Denoiser `{learning.denoiser}`, conditioning `{learning.conditioning}`, readout
`{learning.readout}`, σ from {noise.sigma_max:g} down to {noise.sigma_min:g}.

## Training

Run `{run.run_id}`, text `{run.data.name}`{sha256}, seed {run.seed}.
Versions: {", ".join(f"{group} {version}" for group, version in versions.items())}.

## Quality

Cross-entropies are in nats a byte, from noise through the chain of blocks, on text that was never trained on.

{table}

## Use

```python
import spheroid_node.model

model = spheroid_node.model.load("path/to/this/folder")
```

or `spheroid-node eval --checkpoint path/to/this/folder`. The model continues text in the style of what it was
trained on; it knows no facts, follows no instructions, and was not filtered for what it may say.
"""


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return ", ".join(_number(item) for item in value) if isinstance(value, list | tuple) else str(value)
