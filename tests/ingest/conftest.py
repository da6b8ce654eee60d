"""A follower of a publisher of ours, without sockets, and with a clock that stands still.

Files about stock publishers have fixtures of their own by these names.
"""

import pytest

from kvplug.ingest.follower import Follower
from tests.ingest.life_publisher import RANK, Clock, LifePublisher, TellableRouter


@pytest.fixture
def router():
    router = TellableRouter()
    router.add_worker("w")
    return router


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def follower(router, clock):
    follower = Follower(router, RANK, clock=clock)
    follower.can_ask_publisher = True
    follower.on_connected()
    return follower


@pytest.fixture
def publisher():
    return LifePublisher()
