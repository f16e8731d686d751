from __future__ import annotations

import pytest
import torch

from spheroid_node.errors import DeviceUnavailable, PrecisionUnavailable
from spheroid_node.training.device import available_devices, resolve_device, resolve_precision


def test_the_cpu_is_always_there() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert available_devices()[-1] == "cpu"


def test_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"


def test_a_device_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(DeviceUnavailable, match="cuda:2"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "tpu", "", "cpu:1", "cpu:x"])
def test_what_is_not_there_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match="auto, cpu"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("there", "name", "mixed"),
    [
        (True, "auto", True),
        (True, "bf16", True),
        (True, "float32", False),
        (False, "auto", False),
        (False, "float32", False),
    ],
)
def test_bfloat16_where_it_is_there_and_wanted(
    monkeypatch: pytest.MonkeyPatch, there: bool, name: str, mixed: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: there)
    assert resolve_precision(name, torch.device("cpu")) is mixed


def test_bfloat16_where_it_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(PrecisionUnavailable, match="cpu"):
        resolve_precision("bf16", torch.device("cpu"))
    assert resolve_precision("auto", torch.device("mps")) is False
