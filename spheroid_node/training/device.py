"""The device a block is trained and served on, and the precision it computes in."""

from __future__ import annotations

import psutil
import torch

from spheroid_node.errors import DeviceUnavailable, PrecisionUnavailable


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


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new process may take on ``device``; None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def resolve_precision(name: str, device: torch.device) -> bool:
    """Whether training on ``device`` multiplies in bfloat16: for ``auto`` where that is faster.

    ``name`` is auto, bf16 or float32; parameters, gradients, optimiser and losses are float32 with each.
    Raises :class:`PrecisionUnavailable` for bf16 where the device has no arithmetic for it.
    """
    there = _multiplies_bfloat16(device)
    if name == "bf16" and not there:
        raise PrecisionUnavailable(str(device))
    return there and name != "float32"


def mixed_precision(device: torch.device, enabled: bool) -> torch.autocast:
    """A context in which matrices are multiplied in bfloat16, if ``enabled``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without AVX-512 BF16 (or AMX) a CPU emulates it, several times slower than float32.
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())
