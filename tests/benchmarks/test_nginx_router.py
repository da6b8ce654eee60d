"""The router behind nginx, measured shortly: does the benchmark work?"""

import pytest

from tests.benchmarks.relay import measure
from tests.server.nginx.real_nginx import needs_nginx


@needs_nginx
@pytest.mark.slow
async def test_nginx_and_the_router_are_measured_as_one():
    figures = await measure("nginx", num_chunks=20, num_requests=20, num_rounds=1)
    assert figures["chunks_per_cpu_s"] > 0
    assert figures["requests_per_cpu_s"] > 0
