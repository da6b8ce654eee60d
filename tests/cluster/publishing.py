"""Engines that publish over NATS, and what they hold by a router that missed nothing.

In:  a nats-server, how many engines.   Out: URLs of engines whose events can be published at will.
"""

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from kvplug import Rank, Router, RouterConfig
from kvplug.engines.nats_stream import NatsStream
from kvplug.events import BlockRemoved, BlockStored, CxlState, CxlStateTransition, EventBatch, Tier
from kvplug.index.cxl import CxlBlocks
from kvplug.nats.connection import NatsConnection
from kvplug.nats.permissions import PUBLISHER_NAME
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName
from kvplug.protocol import WorkerHello
from tests.server import kvplug_publisher
from tests.server.engine import Engine, served

logger = logging.getLogger(__name__)

BLOCK_SIZE = 4
TIERS = (Tier.DEVICE, Tier.HOST)


class Publishing:
    """store, remove, move to a CXL pool; the same goes into `reference`, a router beside it."""

    def __init__(self, url, publisher, reference, seed):
        self.url, self.publisher = url, publisher
        self._reference, self._rank = reference, Rank(url)
        self._random, self.chains = Random(seed), []

    def store(self, num_blocks):
        tokens = [self._random.randrange(1, 2**31) for _ in range(BLOCK_SIZE * num_blocks)]
        names = tuple(self._random.getrandbits(63) for _ in range(num_blocks))
        self.chains.append((tokens, names))
        self._publish(
            BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=BLOCK_SIZE)
        )

    def remove(self):
        """The last block of some chain."""
        tokens, names = self.chains.pop(self._random.randrange(len(self.chains)))
        self._publish(BlockRemoved(block_hashes=names[-1:]))
        if names[1:]:
            self.chains.append((tokens[:-BLOCK_SIZE], names[:-1]))

    def pool(self, readers):
        """All blocks of some chain, into a CXL pool; some get no further than on their way."""
        _, names = self._random.choice(self.chains)
        for state in (CxlState.IN_TRANSIT, CxlState.CXL_POOLED)[: self._random.randint(1, 2)]:
            self._publish(
                CxlStateTransition(
                    block_hashes=names,
                    new_state=state,
                    pool_id=3,
                    accessible_workers=tuple(readers),
                )
            )

    def work(self, num_events, readers=()):
        for _ in range(num_events):
            what = self._random.random()
            if not self.chains or what < 0.7:
                self.store(self._random.randint(1, 6))
            elif what < 0.9:
                self.remove()
            else:
                self.pool(readers or [self.url])

    def _publish(self, event):
        batch = EventBatch(events=(event,))
        self.publisher.publish(batch)
        self._reference.apply(self._rank, batch)


@asynccontextmanager
async def publishing(node, num_engines, fleet="f", **keys):
    """Yields the engines and the router that missed nothing. `keys`: more of NatsSettings."""
    reference = Router(RouterConfig(block_size=BLOCK_SIZE))
    async with AsyncExitStack() as stack:
        settings = NatsSettings(servers=(node.url,), fleet=fleet, **keys)
        connection = NatsConnection(settings, PUBLISHER_NAME)
        connection.start()
        stack.callback(connection.stop)
        engines = []
        for number in range(num_engines):
            url = await stack.enter_async_context(served(Engine()))
            reference.add_worker(url, model="m")
            about = WorkerHello(model="m", block_size=BLOCK_SIZE)
            publisher = NatsStream(
                connection, PublisherName(url, 0), about, lambda batch: batch, logger
            )
            stack.callback(publisher.shutdown)
            engines.append(Publishing(url, publisher, reference, number))
        yield engines, reference


@asynccontextmanager
async def publishing_directly():
    """The same with one engine, whose events do not come over NATS; its endpoint too."""
    reference = Router(RouterConfig(block_size=BLOCK_SIZE))
    async with served(Engine()) as url:
        reference.add_worker(url, model="m")
        with kvplug_publisher.publishing(model="m") as publisher:
            yield Publishing(url, publisher, reference, 0), reference


def held_by(router, engines):
    """By engine: the names of its blocks in each tier, and what is known of each of them in CXL."""
    found = {}
    for engine in engines:
        rank = Rank(engine.url)
        with router.locked():
            index = router.index_of(rank)
            cxl = index.annotation(CxlBlocks)
            found[engine.url] = (
                [sorted(index.engine_hashes_of(rank, tier).tolist()) for tier in TIERS],
                [
                    cxl.metadata(rank, int(block))
                    for tokens, _ in engine.chains
                    for block in index.hasher.sequence_hashes(tokens)
                ],
            )
    return found
