"""One real server for all tests of this folder that do not kill it; each has a fleet of its own."""

import itertools

import pytest

from tests.cluster.snapshots import a_fleet
from tests.nats_servers import nats_servers

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server():
    with nats_servers() as (node,):
        yield node


@pytest.fixture
async def fleet(server):
    async with a_fleet(server.url, f"t{next(_numbers)}") as fleet:
        yield fleet
