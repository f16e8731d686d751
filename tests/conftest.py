"""Settings of all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# A busy machine must not fail a property: hypothesis would take 200 ms an example for a failure.
settings.register_profile("spheroid", deadline=None)
settings.load_profile("spheroid")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs in this process sets up logging as for a process of its own."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
