"""An engine without a model that publishes over NATS, as a program.

In:  URLs of NATS servers, the engine's name, a seed; a unix socket for orders.
Out: events of a cache that is always full, by KvEventPublisher. To "held": the ids of the cached
blocks. To ["rate", N]: about N events a second from now on; to ["burst", N]: N events at once.
"""

import argparse
import logging
import threading
from pathlib import Path
from random import Random

from kvplug import KvEventPublisher
from kvplug.nats.settings import NatsSettings
from tests.chaos.asking import answer_in_background

BLOCK_SIZE = 16
CAPACITY_BLOCKS = 400
_MOST_STORED, _MOST_IN_CHAIN = 8, 40
_CLEAR_EVERY = 4000


class Cache:
    """Prefixes that grow, and are evicted from their ends; step publishes what one step does."""

    def __init__(self, publisher, seed):
        self._publisher, self._random = publisher, Random(seed)
        self._chains = []  # of block ids, parents first; the least recently grown one first
        self._lock = threading.Lock()

    def held(self):
        with self._lock:
            return [block for chain in self._chains for block in chain]

    def step(self):
        with self._lock:
            if self._random.randrange(_CLEAR_EVERY) == 0:
                self._publisher.publish_all_cleared()
                self._chains = []
            self._store()
            while sum(map(len, self._chains)) > CAPACITY_BLOCKS:
                self._evict()

    def _store(self):
        chain = []
        if self._chains and self._random.random() < 0.7:
            chain = self._chains.pop(self._random.randrange(len(self._chains)))
        if len(chain) > _MOST_IN_CHAIN:
            self._chains.append(chain)
            chain = []
        names = [self._random.getrandbits(63) for _ in range(self._random.randint(1, _MOST_STORED))]
        tokens = [self._random.randrange(1, 2**31) for _ in range(BLOCK_SIZE * len(names))]
        self._publisher.publish_stored(
            token_ids=tokens, block_hashes=names, parent_hash=chain[-1] if chain else None
        )
        self._chains.append(chain + names)

    def _evict(self):
        chain = self._chains[0]
        num_kept = self._random.randrange(len(chain))
        # The last one first, as engines do.
        self._publisher.publish_removed(block_hashes=chain[num_kept:][::-1])
        self._chains[0:1] = [chain[:num_kept]] if num_kept else []


class Engine:
    """run, for ever; answer, from another thread."""

    def __init__(self, publisher, seed):
        self._cache, self._per_s, self._wake = Cache(publisher, seed), 0.0, threading.Event()

    def run(self):
        while True:
            self._wake.wait(1.0 / self._per_s if self._per_s else None)
            self._wake.clear()
            if self._per_s:
                self._cache.step()

    def answer(self, question):
        if question == "held":
            return self._cache.held()
        order, number = question
        if order == "rate":
            self._per_s = number
            self._wake.set()
        else:
            for _ in range(number):
                self._cache.step()
        return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", required=True, help="with commas between them")
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = NatsSettings(servers=tuple(arguments.servers.split(",")), fleet=arguments.fleet)
    with KvEventPublisher(
        settings.servers[0],
        nats=settings,
        worker=arguments.name,
        kv_block_size=BLOCK_SIZE,
        model="model",
        url=arguments.name,
    ) as publisher:
        engine = Engine(publisher, arguments.seed)
        answer_in_background(arguments.socket, engine.answer)
        engine.run()


if __name__ == "__main__":
    main()
