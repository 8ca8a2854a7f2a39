"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Each run tries the same examples, so that what fails for one fails for all; a machine that stands still is no fault.
settings.register_profile(
    "dike", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("dike")
