"""Settings of hypothesis: how long an example takes says nothing on a shared machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "schedules", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("schedules")
