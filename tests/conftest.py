"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine must not fail a property: hypothesis would take 200 ms an example for a failure.
settings.register_profile("spheroid", deadline=None)
settings.load_profile("spheroid")
