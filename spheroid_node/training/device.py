"""The device a block is trained and served on."""

from __future__ import annotations

import torch

from spheroid_node.errors import DeviceUnavailable


def available_devices() -> tuple[str, ...]:
    """Names of the devices of this machine, fastest first."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return tuple(name for name, there in found.items() if there)


def resolve_device(name: str) -> torch.device:
    """The device called ``name``: ``auto`` (the fastest), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises :class:`DeviceUnavailable` for one that this machine does not have.
    """
    available = available_devices()
    if name == "auto":
        return torch.device(available[0])
    kind, _, index = name.partition(":")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": 1}
    if kind not in available or (index and not (index.isdecimal() and int(index) < counts[kind])):
        raise DeviceUnavailable(name, ("auto", *available))
    return torch.device(name)
