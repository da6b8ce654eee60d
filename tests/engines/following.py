"""A router that follows the ranks of one engine over their sockets."""

from contextlib import contextmanager

from kvplug import Rank, Router, RouterConfig
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from tests.engines.plugged_vllm import BLOCK_SIZE, LOOPBACK
from tests.plugins.stock_client import wait_until


class Following:
    """settle, then compare `blocks` with what the engine has."""

    def __init__(self, router, followers):
        self._router, self.followers = router, followers

    def settle(self, engine):
        """Wait until every batch that the engine published is applied."""
        for rank, follower in enumerate(self.followers):

            def has_everything(rank=rank, follower=follower):
                num_batches = engine.ask_oracle(rank)["num_batches"]
                return num_batches == 0 or follower.sequencer.last == num_batches - 1

            wait_until(has_everything, f"every batch of rank {rank} has arrived")
        with self._router.locked():
            self._router.index.check()

    def blocks(self, rank=0):
        with self._router.locked():  # an event may come meanwhile
            hashes = self._router.index.engine_hashes_of(Rank("engine", rank))
        return {int(name) for name in hashes}


@contextmanager
def following(engine, *, dp_size=1):
    router = Router(RouterConfig(block_size=BLOCK_SIZE))
    router.add_worker("engine", dp_size=dp_size)
    followers = [Follower(router, Rank("engine", rank)) for rank in range(dp_size)]
    listener = EventThread()
    listener.start()
    try:
        for rank, follower in enumerate(followers):
            listener.follow(follower, f"tcp://{LOOPBACK}:{engine.events_port + rank}", "kv@")
        wait_until(lambda: all(f.connected for f in followers), "the event streams are connected")
        yield Following(router, followers)
    finally:
        listener.stop()
