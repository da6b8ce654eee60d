"""Many streams, in small; `make resilience` and `make soak-service` run them whole.

How long others wait is measured there; a few requests beside other tests tell only that they are
answered.
"""

import math

import pytest

from tests.resilience import load_trouble
from tests.resilience.soak_service import soak

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("scenario", "sizes"),
    [
        (load_trouble.cancelled_streams, {"num_streams": 400}),
        (load_trouble.killed_worker, {"num_streams": 120}),
        (load_trouble.migrated_streams, {"num_streams": 120}),
        (load_trouble.slow_others, {"num_slow": 20, "seconds": 2.0, "max_slowdown_ms": math.inf}),
        (load_trouble.restarted_router, {"num_restarts": 1}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_nobody_else_is_hurt(scenario, sizes):
    seen, defects = await scenario(**sizes)
    assert defects == [], seen


def test_memory_is_flat():
    seen = soak(20.0)
    assert seen.defects == []
    assert seen.num_requests > 500
