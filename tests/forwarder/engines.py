"""Publishers of engines for tests: the stock one and our own, over real ZMQ sockets.

In:  events.   Out: messages at an endpoint, replays or answers at another; what the engine holds.
"""

import logging
from contextlib import contextmanager

from kvplug import codec
from kvplug.engines.event_stream import EventStream
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Namespace
from kvplug.forwarder.config import ZmqKvEventPublisherConfig
from kvplug.forwarder.forwarder import Forwarder
from kvplug.ingest.replay import ReplaySettings
from kvplug.nats.settings import NatsSettings
from kvplug.protocol import WorkerHello

WORKER = "http://10.0.0.7:8000"
BLOCK_SIZE = 4
logger = logging.getLogger("tests.forwarder")
FAST = ReplaySettings(answer_timeout_s=0.5, pause_s=1.0, lost_after_s=1.0, check_every_s=1.0)


class Engine:
    """store, remove, clear; `held`: the names of its blocks. Read endpoint and replay."""

    def __init__(self, endpoint="tcp://127.0.0.1:0", *, is_ours=False, replays=True, **more):
        replay = "tcp://127.0.0.1:0" if replays else None
        config = PublisherConfig(endpoint=endpoint, replay_endpoint=replay, **more)
        self.is_ours, self.held = is_ours, set()
        if is_ours:
            about = WorkerHello(block_size=BLOCK_SIZE, model="m")
            self.publisher = EventStream(config, about, lambda batch: batch, logger, must_bind=True)
        else:
            self.publisher = Publisher(config, 0, codec.encode, logger, must_bind=True)

    @property
    def endpoint(self):
        return self.publisher.endpoint

    @property
    def replay(self):
        return None if self.is_ours else self.publisher.answers_at

    def store(self, name, num_blocks=1, parent=None):
        names = tuple(range(name, name + num_blocks))
        self.held |= set(names)
        self._say(
            BlockStored(
                block_hashes=names, token_ids=tuple(range(name, name + BLOCK_SIZE * num_blocks)),
                block_size=BLOCK_SIZE, parent=parent,
                namespace=None if parent is not None else Namespace(),
            )
        )  # fmt: skip

    def remove(self, *names):
        self.held -= set(names)
        self._say(BlockRemoved(block_hashes=names))

    def clear(self):
        self.held.clear()
        self._say(AllBlocksCleared())

    def _say(self, *events):
        self.publisher.publish(EventBatch(events=events, dp_rank=0))

    def close(self):
        self.publisher.shutdown()


@contextmanager
def engine(endpoint="tcp://127.0.0.1:0", **more):
    made = Engine(endpoint, **more)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def forwarding(nats, *engines, replay_settings=FAST, **more):
    """A forwarder of engines, which are Engines or configurations, to a URL or by NatsSettings."""
    configs = [each if isinstance(each, ZmqKvEventPublisherConfig) else config_of(each, **more)
               for each in engines]  # fmt: skip
    settings = NatsSettings(servers=(nats,)) if isinstance(nats, str) else nats
    forwarder = Forwarder(settings, configs, replay_settings=replay_settings)
    forwarder.start()
    try:
        yield forwarder
    finally:
        forwarder.stop()


def config_of(engine, worker=WORKER, **more):
    return ZmqKvEventPublisherConfig(
        worker_id=worker, kv_block_size=BLOCK_SIZE,
        **{"zmq_endpoint": engine.endpoint, "zmq_replay_endpoint": engine.replay} | more,
    )  # fmt: skip
