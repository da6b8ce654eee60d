"""Workers that leave the fleet and are back, and publishers that become usable: nothing stays lost,
and nothing is EXACT that is not.
"""

import pytest

from kvplug import EventBatch, Rank, codec, packed
from kvplug.events import BlockStored
from kvplug.ingest import trust
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.transports.base import Message
from tests.ingest.life_publisher import (
    RANK,
    LifePublisher,
    TellableRouter,
    answer,
    join,
    names,
    wait,
)


@pytest.fixture
def publisher():
    publisher = LifePublisher()
    publisher.store(3)
    return publisher


def test_a_worker_that_is_back_gets_its_blocks_again(router, follower, publisher, clock):
    join(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2, 3])
    router.remove_worker("w")
    follower.receive([publisher.store()])  # nobody's
    router.add_worker("w")
    follower.tick()
    assert follower.trust.level is not Trust.EXACT
    wait(follower, clock, 1.0)
    follower.receive([publisher.hello()])
    answer(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2, 3, 4])
    router.index.check()


def test_another_block_size_is_asked_about_anew(follower, publisher, clock):
    router = TellableRouter(block_size=None)
    router.add_worker("w")
    follower = Follower(router, RANK, clock=clock)
    follower.can_ask_publisher = True
    follower.on_connected()
    join(follower, publisher)
    router.add_worker("w", block_size=32)
    follower.tick()
    wait(follower, clock, 1.0)
    follower.receive([publisher.hello(), publisher.store()])
    assert follower.trust == trust.unusable("block_size")
    assert len(router.index_of(RANK)) == 0


def test_a_stock_publisher_is_not_exact_either(router, follower):
    follower.receive([stock(0, 1), stock(1, 2)])
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2])
    router.remove_worker("w")
    router.add_worker("w")
    follower.tick()
    assert follower.trust.level is not Trust.EXACT
    follower.receive([stock(2, 3)])
    assert (follower.trust, names(router)) == (trust.LATE_JOIN, [3])


def stock(number, name):
    event = BlockStored(block_hashes=(name,), token_ids=(name,) * 4, block_size=4)
    return Message(b"", number, codec.encode(EventBatch(events=(event,))))


def test_a_refusal_is_reconsidered_with_each_hello(router, publisher, clock):
    """Another rank of the worker holds blocks of the former size, until it restarts, too."""
    router = TellableRouter(block_size=None)
    router.add_worker("w", dp_size=2)
    other = Rank("w", 1)
    router.set_blocks(other, 8)
    router.apply_packed(other, packed.encode([packed.PackedStored([1], [1])]))
    follower = Follower(router, RANK, clock=clock, engine_rank=0)
    follower.can_ask_publisher = True
    follower.on_connected()
    follower.receive([publisher.hello()])
    assert follower.trust == trust.unusable("block_size")
    assert follower.skipped["block_size"] == 1
    follower.receive([publisher.hello()])
    assert follower.skipped["block_size"] == 1
    router.clear(other)
    wait(follower, clock, 1.0)
    join(follower, publisher)
    assert (follower.trust, names(router)) == (trust.EXACT, [1, 2, 3])


def test_a_publisher_that_takes_another_rank_leaves_no_blocks_behind(publisher, clock):
    router = TellableRouter()
    router.add_worker("w", dp_size=2)
    follower = Follower(router, RANK, clock=clock)
    follower.can_ask_publisher = True
    follower.on_connected()
    join(follower, publisher)
    publisher.about["dp_rank"] = 1
    wait(follower, clock, 1.0)
    join(follower, publisher)
    assert names(router) == []
    assert len(router.index.engine_hashes_of(Rank("w", 1))) == 3
