"""Engines that compute the last block of a reused prefix anew: the audit learns it, and the router
counts on it.
"""

import pytest

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.audit.audit import Audit, Usage
from kvplug.audit.expectation import Verdict
from kvplug.errors import ConfigError

RANK, BLOCK = Rank("a"), 4
LATER_S = 20.0


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Engine:
    """It reuses all but so many of the blocks that it has; prompts are told apart by a number."""

    def __init__(self, num_recomputed=1):
        self.clock, self.num_recomputed = Clock(), num_recomputed
        config = RouterConfig(block_size=BLOCK, speculative_ttl_s=0.0)
        self.router = Router(config, clock=self.clock)
        self.router.add_worker("a")
        self.audit = Audit(self.router)

    def stored(self, number, num_blocks):
        tokens = self.prompt(number, num_blocks)[:-1]
        names = tuple(1000 * number + i for i in range(num_blocks))
        event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=BLOCK)
        self.router.apply(RANK, EventBatch(events=(event,)))

    def prompt(self, number, num_blocks):
        return [number] * (num_blocks * BLOCK) + [0]

    def ask(self, number, num_blocks):
        """Returns the cached tokens that the router predicted."""
        tokens = self.prompt(number, num_blocks)
        decision = self.router.route(tokens)
        cached = max(0, num_blocks - self.num_recomputed) * BLOCK
        self.router.finish(decision.request_id)
        self.audit.answered(decision.request_id, Usage(len(tokens), cached))
        self.clock.now_s += LATER_S
        self.audit.ledgers()
        return decision.cached_tokens


@pytest.fixture
def engine():
    engine = Engine()
    for number in range(1, 12):
        engine.stored(number, 3)
    return engine


def predictions(engine, numbers):
    return [engine.ask(number, 3) // BLOCK for number in numbers]


def test_after_eight_reuses_that_are_a_block_short_the_router_expects_it(engine):
    assert predictions(engine, range(1, 9)) == [3] * 8
    assert predictions(engine, range(1, 9)) == [2] * 8
    ledger = engine.audit.ledgers()[RANK]
    assert ledger.num_by_verdict == {Verdict.WRONG_RESIDENT: 8, Verdict.AS_PREDICTED: 8}
    assert all(ledger.was_stored)


def test_it_is_unlearnt_when_the_engine_reuses_all_again(engine):
    predictions(engine, range(1, 9))
    engine.num_recomputed = 0
    assert predictions(engine, range(1, 9)) == [2] * 8
    assert predictions(engine, range(1, 9)) == [3] * 8


def test_one_reuse_that_is_not_short_says_that_it_is_something_else(engine):
    predictions(engine, range(1, 8))
    engine.num_recomputed = 0
    predictions(engine, [8])
    engine.num_recomputed = 1
    assert predictions(engine, range(1, 8)) == [3] * 7


def test_an_eviction_is_seen_as_before(engine):
    predictions(engine, range(1, 9))
    assert engine.router.route(engine.prompt(1, 3)).overlap_blocks == 2
    engine.router.clear(RANK)
    assert engine.router.route(engine.prompt(1, 3)).overlap_blocks == 0


def test_it_can_be_said_without_an_audit():
    engine = Engine()
    engine.router.set_recomputed_blocks(RANK, 1)
    engine.stored(1, 3)
    assert engine.router.route(engine.prompt(1, 3)).overlap_blocks == 2
    assert engine.router.route(engine.prompt(1, 3)[:-1]).overlap_blocks == 1  # 12 tokens
    with pytest.raises(ConfigError, match="recomputed blocks must be 0 or 1, got 2"):
        engine.router.set_recomputed_blocks(RANK, 2)


def test_it_stays_with_a_rank_whose_worker_changes_the_index():
    engine = Engine()
    engine.router = Router(RouterConfig(speculative_ttl_s=0.0))  # the size comes with the events
    engine.router.add_worker("a")
    engine.router.set_recomputed_blocks(RANK, 1)
    engine.stored(1, 3)
    assert engine.router.route(engine.prompt(1, 3)).overlap_blocks == 2
