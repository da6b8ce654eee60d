"""What all tests of the standalone router share."""

import pytest

from kvplug import kernels


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels():
    """As `python -m kvplug.router` does: what is routed is expected for seconds only."""
    kernels.compile_all()
