"""The short form of `make rounds-cluster`."""

import pytest

from tests.cluster.rounds import run


@pytest.mark.slow
async def test_whoever_dies_or_stops_no_message_is_missed(server):
    seen = await run(server, "rounds", 6000, 1000, 500)
    assert len({step for _, step in seen.faults}) >= 3
