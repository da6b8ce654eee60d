"""Kernels wrap u64 on purpose; without JIT NumPy would warn about it."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def wrapping_u64():
    with np.errstate(over="ignore"):
        yield


def pytest_collection_modifyitems(items):
    for item in items:
        if "/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.kernel)
