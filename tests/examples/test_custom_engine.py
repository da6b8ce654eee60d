"""A custom engine publishes, and a router goes by what it says."""

from examples import custom_engine
from kvplug import KvEventPublisher, Rank, Router, RouterConfig
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import EXACT
from tests.plugins.stock_client import wait_until


def test_a_router_follows_a_custom_engine():
    router = Router(RouterConfig(block_size=custom_engine.BLOCK_SIZE))
    router.add_worker("mine")
    follower, listener = Follower(router, Rank("mine")), EventThread()
    size = custom_engine.BLOCK_SIZE
    listener.start()
    try:
        with KvEventPublisher("tcp://127.0.0.1:0", kv_block_size=size) as publisher:
            listener.follow(follower, publisher.endpoint)
            custom_engine.publish(publisher)

            def is_known():
                decision = router.peek(custom_engine.PROMPT)
                return follower.trust == EXACT and decision.cached_tokens == 2 * size

            wait_until(is_known, "the router knows the two blocks that are left")
    finally:
        listener.stop()
