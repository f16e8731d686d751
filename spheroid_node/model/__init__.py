"""The model as one process sees it: noise schedule, denoiser, blocks, interface, composed stack."""

from __future__ import annotations

import json
from pathlib import Path

from spheroid_node.errors import ModelInvalid
from spheroid_node.model.composed import ChainState, ComposedModel, Hop
from spheroid_node.run import RunSpec

__all__ = ["ChainState", "ComposedModel", "Hop", "load"]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def load(directory: str | Path) -> ComposedModel:
    """The model that ``spheroid-node export`` wrote, on the CPU, ready for inference.

    Raises :class:`ModelInvalid` for a directory without one, or with one that is damaged.
    """
    # The one function of this room that reads a file: users know it by this name (docs/decisions.md).
    from safetensors.torch import load_file

    directory = Path(directory)
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        model = ComposedModel(RunSpec.model_validate(config["run"]))
        model.load_state_dict(load_file(directory / WEIGHTS_FILE))
    except OSError as error:
        raise ModelInvalid(str(directory), error.strerror or str(error)) from error
    except Exception as error:  # json, pydantic, safetensors and torch each raise their own
        raise ModelInvalid(str(directory), str(error).splitlines()[0]) from error
    return model.eval()
