"""Every test here is about kernels: `pytest -m kernel` runs them alone."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.kernel)
