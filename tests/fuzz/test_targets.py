"""The targets of the fuzzer on some inputs each, with an eye on the memory that an input costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .source import Source
from .targets import TARGETS, quiet

MOST_BYTES = 8 * 1024 * 1024
"""Memory that an input of at most 600 bytes may cost at a time; a believed length would cost far more."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=600) | st.integers(0, 2**32).map(lambda seed: Random(seed).randbytes(400)))
def test_target(name: str, data: bytes) -> None:
    TARGETS[name](Source(b""))  # what is made once is there
    tracemalloc.start()
    try:
        TARGETS[name](Source(data))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
