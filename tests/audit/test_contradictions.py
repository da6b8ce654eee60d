"""Engines that reuse less than their events say: it is found, named, and counts no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Namespace, Rank, Router, RouterConfig, Tier
from kvplug.audit import contradictions
from kvplug.audit.audit import Audit, Usage
from kvplug.audit.contradictions import Blocks, Contradictions, Scope

RANK, BLOCK = Rank("a"), 4
LATER_S = 20.0
X = Namespace("x")


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Engine:
    """It says that it has three blocks of each prompt, told apart by a number."""

    def __init__(self):
        self.clock = Clock()
        config = RouterConfig(block_size=BLOCK, speculative_ttl_s=0.0)
        self.router = Router(config, clock=self.clock)
        self.router.add_worker("a")
        self.audit = Audit(self.router)

    def store(self, number, **more):
        names = tuple(10 * number + i for i in range(3))
        self.apply(block_hashes=names, token_ids=(number,) * (3 * BLOCK), **more)

    def apply(self, **stored):
        event = BlockStored(block_size=BLOCK, **stored)
        return self.router.apply(RANK, EventBatch(events=(event,)))

    def ask(self, number, num_cached, namespace=Namespace()):  # noqa: B008 - immutable
        """The engine reuses so many blocks; returns how many the router predicted."""
        tokens = [number] * (3 * BLOCK) + [0]
        decision = self.router.route(tokens, namespace=namespace)
        self.router.finish(decision.request_id)
        self.audit.answered(decision.request_id, Usage(len(tokens), num_cached * BLOCK))
        self.clock.now_s += LATER_S
        self.audit.ledgers()
        return decision.overlap_blocks


@pytest.fixture
def engine():
    engine = Engine()
    for number in range(1, 4):
        engine.store(number)
    return engine


def test_two_requests_that_had_less_are_no_accident(engine):
    engine.ask(1, num_cached=0)
    engine.ask(2, num_cached=3)
    assert engine.audit.contradicted(RANK) is None
    assert engine.audit.confidence(RANK) > 0
    engine.ask(1, num_cached=2)
    assert engine.audit.contradicted(RANK) == (2, 3)
    assert engine.audit.confidence(RANK) == 0.0


def test_it_ends_after_sixteen_right_ones(engine):
    for _ in range(4):
        engine.ask(1, num_cached=0)
    for _ in range(15):
        engine.ask(2, num_cached=3)
    assert engine.audit.contradicted(RANK) is not None
    engine.ask(2, num_cached=3)
    assert engine.audit.contradicted(RANK) is None


def test_a_single_block_is_one_that_is_computed_anew(engine):
    for _ in range(20):
        engine.ask(1, num_cached=2)
    assert engine.audit.contradicted(RANK) is None


def test_an_adapter_is_forgotten_and_nothing_else_suffers(engine):
    for number in (4, 5):
        engine.store(number, namespace=X)
    assert engine.ask(4, num_cached=0, namespace=X) == 3
    engine.ask(4, num_cached=0, namespace=X)
    assert engine.ask(4, num_cached=0, namespace=X) == 0
    assert engine.ask(5, num_cached=0, namespace=X) == 0
    assert engine.ask(1, num_cached=3) == 3
    assert engine.audit.contradicted(RANK) is None


def test_a_tier_is_forgotten_and_refused_and_nothing_else_suffers(engine):
    engine.store(4, tier=Tier.HOST)
    for _ in range(2):
        assert engine.ask(4, num_cached=0) == 3
    assert engine.ask(4, num_cached=0) == 0
    stored = {"block_hashes": (60,), "token_ids": (6,) * BLOCK}
    assert engine.apply(**stored, tier=Tier.DISK).rejected == {"refused_tier": 1}
    assert engine.apply(**stored).num_stored == 1
    assert engine.ask(1, num_cached=3) == 3
    assert engine.audit.contradicted(RANK) is None
    assert list(engine.audit.ledgers()[RANK].contradictions) == [contradictions.TIER]


def test_the_index_stays_sound_when_packed_events_come_for_a_refused_tier(engine):
    from kvplug import packed

    index = engine.router.index
    index.refuse_lower_tiers(RANK)
    payload = packed.encode([packed.PackedStored([70], [700], tier=Tier.HOST)])
    assert engine.router.apply_packed(RANK, payload).rejected == {"refused_tier": 1}
    index.check()


@given(
    requests=st.lists(st.integers(0, 2), max_size=150),
    others=st.lists(st.integers(0, 2), max_size=20),
)
def test_it_is_two_of_the_last_64_until_sixteen_in_a_row_are_right(requests, others):
    found, expected, window = Contradictions(), False, []
    for num_missing in others:
        found.note(Scope(Blocks.ADAPTER, "x"), num_missing)
    for num_missing in requests:
        window = [*window, num_missing][-64:]
        is_enough = sum(map(bool, window)) >= 2 and 2 in window
        before, expected = expected, expected or is_enough
        if before and len(window) >= 16 and not any(window[-16:]):
            expected, window = False, []
        is_new = found.note(contradictions.DEVICE, num_missing)
        assert is_new == (expected and not before)
        assert (contradictions.DEVICE in found) == expected
        assert found.counts(contradictions.DEVICE) == (sum(map(bool, window)), len(window))
