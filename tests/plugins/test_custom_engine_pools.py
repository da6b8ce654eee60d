"""CXL states and experts of an engine of one's own, through sockets into a router."""

import pytest

from kvplug import (
    BlockCopies,
    CxlMetadata,
    CxlState,
    KvEventPublisher,
    MoeLabel,
    Rank,
    Router,
    RouterConfig,
    Tier,
)
from kvplug.index.cxl import CxlBlocks
from kvplug.index.moe_labels import MoeLabels
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from tests.plugins.stock_client import wait_until

ENGINE, OTHER, STRANGER = map(Rank, ("engine", "other", "stranger"))
TOKENS, EXPERT, POOL = list(range(12)), MoeLabel(3, 7, 1), 5
ON_DEVICE = BlockCopies(tiers=(Tier.DEVICE,))


class Fleet:
    """A router that follows the engine; two further workers are in its fleet."""

    def __init__(self, listener, publisher):
        self.router = Router(RouterConfig(block_size=4, speculative_ttl_s=0.0))
        for rank in (ENGINE, OTHER, STRANGER):
            self.router.add_worker(rank.worker)
        self.router.set_cxl_pools(OTHER.worker, [POOL])
        self.follower, self._stream = Follower(self.router, ENGINE), publisher._publisher
        listener.follow(self.follower, publisher.endpoint)
        wait_until(lambda: self.follower.about is not None, "the publisher has said hello")

    def settle(self):
        stream = self._stream
        wait_until(lambda: stream.num_applied == stream.num_published, "all is applied")
        last = stream.life.position[1] - 1
        wait_until(lambda: self.follower.sequencer.last == last, "all has arrived")
        self.router.index.check()

    def view(self):
        """For each block: its state, its copies, its label; and who reads how many of them."""
        self.settle()
        index = self.router.index
        hashes = index.hasher.sequence_hashes(TOKENS)
        cxl, moe = index.annotation(CxlBlocks), index.annotation(MoeLabels)
        blocks = [
            (cxl.metadata(ENGINE, each), copies.get(ENGINE), moe.label(ENGINE, each))
            for each, copies in zip(hashes.tolist(), self.router.holders_of(TOKENS), strict=True)
        ]
        overlap = index.overlap(hashes)
        readable = [overlap.of(rank).cxl_accessible for rank in (ENGINE, OTHER, STRANGER)]
        return blocks, readable


@pytest.fixture
def listener():
    listener = EventThread()
    listener.start()
    yield listener
    listener.stop()


@pytest.fixture
def publisher():
    with KvEventPublisher("tcp://127.0.0.1:0", kv_block_size=4, cxl_pools=(POOL,)) as publisher:
        yield publisher


def stored(publisher, **details):
    publisher.publish_stored(
        token_ids=TOKENS, num_block_tokens=[4, 4, 4], block_hashes=[1, 2, 3], moe=EXPERT, **details
    )


def move(publisher, state, **place):
    publisher.publish_cxl_state_transition(block_hashes=[1, 2, 3], new_state=state, **place)


def test_every_state_reaches_the_index(listener, publisher):
    fleet = Fleet(listener, publisher)
    assert fleet.follower.about.cxl_pools == (POOL,)
    stored(publisher, cxl_metadata={"state": "local_gpu"})
    assert fleet.view() == ([(None, ON_DEVICE, EXPERT)] * 3, [3, 0, 0])

    move(publisher, "in_transit", pool_id=POOL)
    moving = CxlMetadata(CxlState.IN_TRANSIT, POOL)
    assert fleet.view() == ([(moving, ON_DEVICE, EXPERT)] * 3, [3, 0, 0])

    move(publisher, "cxl_pooled")
    pooled = CxlMetadata(CxlState.CXL_POOLED, POOL)
    copy = BlockCopies(pools=((ENGINE.worker, OTHER.worker),))
    assert fleet.view() == ([(pooled, copy, EXPERT)] * 3, [3, 3, 0])

    move(publisher, "cxl_pooled", accessible_workers=[STRANGER])
    pooled = CxlMetadata(CxlState.CXL_POOLED, POOL, (STRANGER.worker,))
    copy = BlockCopies(pools=((STRANGER.worker,),))
    assert fleet.view() == ([(pooled, copy, EXPERT)] * 3, [3, 0, 3])
    assert Fleet(listener, publisher).view() == fleet.view()

    move(publisher, "evicted")
    evicted = CxlMetadata(CxlState.EVICTED, POOL, (STRANGER.worker,))
    assert fleet.view() == ([(evicted, None, None)] * 3, [0, 0, 0])
    assert Fleet(listener, publisher).view() == fleet.view()


def test_a_pooled_block_that_is_stored_again_is_in_both(listener, publisher):
    fleet = Fleet(listener, publisher)
    stored(publisher)
    move(publisher, "in_transit", pool_id=POOL)
    move(publisher, "cxl_pooled")
    publisher.publish_stored(token_ids=TOKENS[:4], num_block_tokens=[4], block_hashes=[1])
    [(_, first, label), *_], readable = fleet.view()
    assert first == BlockCopies(tiers=(Tier.DEVICE,), pools=((ENGINE.worker, OTHER.worker),))
    assert (label, readable) == (EXPERT, [3, 3, 0])
    assert Fleet(listener, publisher).view() == fleet.view()
