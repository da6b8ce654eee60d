"""Replicas of a router in virtual time, whose messages a test carries, loses and doubles."""

import random

import numpy as np

from kvplug import Rank, Router, RouterConfig
from kvplug.cluster.load_exchange import LoadExchange
from kvplug.kernels import costing

SIZE = 4
WORKERS = ("http://a:8000", "http://b:8000", "http://c:8000")
# What replicas agree on: all but when the oldest request began, and how long it takes.
AGREED = [
    costing.WAITING_MS, costing.NUM_WAITING, costing.NUM_RUNNING, costing.PREFILL_TOKENS,
    costing.CONTEXT_TOKENS, costing.ACTIVE_BLOCKS, costing.COMING_BLOCKS,
]  # fmt: skip


class Clock:
    """The time that a test says."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Replica:
    """A router and its exchange; `flights`: requests that it has in flight."""

    def __init__(self, name, clock, *, workers=WORKERS, config=None, seed=0, life=None):
        self.name = name
        self.router = Router(
            config or RouterConfig(block_size=SIZE), clock=clock, random_=random.Random(seed)
        )
        for worker in workers:
            self.router.add_worker(worker)
        self.num_woken = 0
        self.exchange = LoadExchange(self.router, name, self.woken, life)
        self.router.load.listener = self.exchange
        self.flights = []

    def woken(self):
        self.num_woken += 1

    def route(self, tokens, **options):
        decision = self.router.route(tokens, **options)
        self.flights.append(decision.request_id)
        return decision

    def load_of(self, worker):
        """The agreed columns of a worker's first rank."""
        number = self.router.fleet_index.numbers.number_of(Rank(worker))
        return self.router.load.ranks[number, AGREED].copy()

    def loads(self):
        """{rank: agreed columns}."""
        return {str(rank): self.load_of(rank.worker) for rank in self.router.ranks}


def carry(replicas, *, lost=lambda: False):
    """All news to all others; `lost()` says of each copy whether it is."""
    for sender in replicas:
        give(sender, replicas, sender.exchange.news(), lost=lost)


def say_rows(replicas, *, lost=lambda: False):
    """What each says every second."""
    for sender in replicas:
        give(sender, replicas, sender.exchange.rows(), lost=lost)


def give(sender, replicas, payloads, *, lost=lambda: False):
    for payload in payloads:
        for each in replicas:
            if each is sender or not lost():
                each.exchange.hear(sender.name, payload)


def require_equal(replicas):
    """All see the same load."""
    first, *others = (replica.loads() for replica in replicas)
    for other in others:
        assert other.keys() == first.keys()
        for name, row in first.items():
            np.testing.assert_allclose(other[name], row, atol=1e-6, err_msg=name)
