"""Settings of the whole suite."""

import gc
import os

import pytest
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


def pytest_configure(config):
    config.addinivalue_line("markers", "uses(*recipes): engines that the test uses, see EnginePool")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What is imported stays: to look through it in every collection costs seconds."""
    gc.collect()
    gc.freeze()
