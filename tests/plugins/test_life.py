"""A life whose events cannot be packed: nobody knows what was said, and followers are told so."""

import logging

import pytest

from kvplug import protocol
from kvplug.engines.event_stream import EventStream
from kvplug.engines.life import BAD_VALUE, Life
from kvplug.engines.settings import PublisherConfig
from kvplug.events import (
    AllBlocksCleared,
    BlockStored,
    CxlMetadata,
    CxlState,
    EventBatch,
    MoeLabel,
    Namespace,
    Tier,
)
from kvplug.protocol import Ask, WorkerHello
from tests.plugins.stock_client import wait_until
from tests.plugins.stream_client import StreamClient

ABOUT = WorkerHello(block_size=4)


def stored(name, **more):
    event = BlockStored(
        block_hashes=(name,), token_ids=(name,) * 4, block_size=4,
        **{"namespace": Namespace()} | more,
    )  # fmt: skip
    return EventBatch(events=(event,))


ODD = {
    "moe": stored(2, moe=object()),
    "pool": stored(2, cxl=CxlMetadata(CxlState.CXL_POOLED, 2**70, ())),
    "expert": stored(2, moe=MoeLabel(2**70, 2)),
    "salt": stored(2, namespace=Namespace("", 5)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_what_cannot_be_packed_begins_a_life_with_nothing(odd):
    life = Life(ABOUT)
    life.apply([stored(1)])
    before = life.position
    with pytest.raises((TypeError, OverflowError, AttributeError)):
        life.apply([stored(3), odd])
    assert life.position[0] != before[0]
    assert life.position[1] == life.num_blocks == 0
    assert life.about.defects == {BAD_VALUE: 1}
    hello, events = life.apply([stored(4)])
    assert protocol.decode(hello.payload).about.defects == {BAD_VALUE: 1}
    assert protocol.decode(events.payload).number == 0
    assert life.answer(Ask(0, 0)).listing is not None


def test_followers_are_told_at_once_and_the_rest_goes_on(caplog):
    stream = EventStream(
        PublisherConfig(endpoint="tcp://127.0.0.1:0"), ABOUT, lambda batch: batch,
        logging.getLogger("tests.plugins"),
    )  # fmt: skip
    client = StreamClient()
    try:
        client.join(stream.endpoint)
        client.catch_up(stream.answers_at)
        for _ in range(2):
            stream.publish(ODD["moe"])
            count = stream.num_published
            wait_until(lambda count=count: stream.num_applied == count, "it is applied")
            while BAD_VALUE not in client.receive_hello().about.defects:
                pass
        stream.publish(stored(5))
        wait_until(lambda: stream.life.num_blocks == 1, "the next batch is applied")
        client.catch_up(stream.answers_at)
        assert client.names() == {5}
        assert stream.failures == {"TypeError": 2}
        [record] = caplog.records
        assert "are lost: TypeError" in record.getMessage()
    finally:
        client.close()
        stream.shutdown()


def test_who_feeds_a_life_may_doubt_it():
    life = Life(ABOUT)
    life.hello()
    life.doubt({"zmq_lost": 3})
    hello, events = life.apply([stored(1, parent=7), stored(2)])
    assert protocol.decode(hello.payload).about.defects == {"zmq_lost": 3, "unknown_parent": 1}
    assert protocol.decode(events.payload).number == 0
    life.doubt({})
    assert protocol.decode(life.hello().payload).about.defects == {"unknown_parent": 1}


def test_a_life_that_begins_anew_has_nothing_and_lacks_nothing():
    life = Life(ABOUT)
    life.begin_again(2)
    life.apply([stored(1)])
    before = life.position
    life.begin_anew()
    assert life.position[0] != before[0]
    assert life.position[1] == life.num_blocks == 0
    assert life.about.defects == {}


def test_an_emptied_cache_is_counted():
    life = Life(ABOUT)
    life.apply([stored(1), EventBatch(events=(AllBlocksCleared(tier=Tier.HOST),))])
    assert life.num_cleared == 0
    life.apply([EventBatch(events=(AllBlocksCleared(),))])
    assert life.num_cleared == 1
