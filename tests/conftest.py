"""Settings of the whole suite."""

import os

from hypothesis import HealthCheck, settings

# The machines are small and noisy: a slow example is no failure. KVPLUG_TEST_EXAMPLES turns up
# the search (or down, where the kernels run as plain Python).
settings.register_profile(
    "kvplug",
    deadline=None,
    max_examples=int(os.environ.get("KVPLUG_TEST_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvplug")
