"""The benchmark of the relay in its shortest form: what it counts comes through each proxy."""

import pytest

from tests.benchmarks.relay import measure
from tests.benchmarks.relay_bare import STACKS


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
async def test_a_bare_proxy_is_measured(stack):
    figures = await measure(stack, num_chunks=20, num_requests=100, num_rounds=1)
    assert set(figures) == {"chunks_per_cpu_s", "requests_per_cpu_s"}
    assert all(figure > 0 for figure in figures.values())
