"""The approximate mode: no events, the router goes by its own decisions."""

import random

import pytest

from kvplug import BlockStored, EventBatch, Namespace, Rank, codec
from kvplug.audit.audit import Audit
from kvplug.errors import ConfigError
from kvplug.ingest.follower import Follower
from kvplug.records import read_payloads
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from tests.router.test_core import PROMPT, Clock, make_router

STORED = BlockStored(block_hashes=(1,), token_ids=(1, 2, 3, 4), block_size=4)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def router(clock):
    return make_router("a", "b", "c", clock=clock, use_kv_events=False)


def route(router, tokens, **more):
    """A request that is over at once: only what is cached tells the workers apart."""
    decision = router.route(tokens, **more)
    router.finish(decision.request_id)
    return decision


def test_the_next_request_with_the_prefix_goes_to_the_same_worker(router):
    first = route(router, PROMPT)
    assert first.overlap_blocks == 0
    for _ in range(5):
        again = route(router, [*PROMPT, 7, 8])
        assert (again.rank, again.overlap_blocks) == (first.rank, 16)


def test_it_is_forgotten_when_the_time_is_up(router, clock):
    route(router, PROMPT)
    clock.now_s += 119.9
    assert route(router, PROMPT[:32]).overlap_blocks == 8
    clock.now_s += 0.2
    # The second half is 120 s old, the first was renewed.
    assert route(router, PROMPT).overlap_blocks == 8


def test_each_request_renews_all_that_it_has(router, clock):
    for _ in range(5):
        decision = route(router, PROMPT)
        clock.now_s += 100.0
    assert decision.overlap_blocks == 16
    clock.now_s += 20.0
    assert route(router, PROMPT).overlap_blocks == 0


def test_the_time_to_live_is_a_setting(clock):
    router = make_router("a", clock=clock, use_kv_events=False, approximate_ttl_s=5.0)
    route(router, PROMPT)
    clock.now_s += 4.9
    assert route(router, PROMPT).overlap_blocks == 16
    clock.now_s += 5.0
    assert route(router, PROMPT).overlap_blocks == 0


def test_what_is_speculative_does_not_matter(clock):
    router = make_router("a", clock=clock, use_kv_events=False, speculative_ttl_s=0.0)
    route(router, PROMPT)
    clock.now_s += 60.0
    assert route(router, PROMPT).overlap_blocks == 16


def test_a_worker_that_is_removed_is_forgotten(router):
    first = route(router, PROMPT)
    router.remove_worker(first.rank.worker)
    other = route(router, PROMPT)
    assert (other.rank != first.rank, other.overlap_blocks) == (True, 0)
    router.add_worker(first.rank.worker)  # the same name, another engine
    assert route(router, PROMPT, workers=[first.rank.worker]).overlap_blocks == 0
    router.index.check()


def test_a_worker_that_is_cleared_has_nothing(router):
    first = route(router, PROMPT)
    router.clear(first.rank)
    assert route(router, PROMPT, workers=[first.rank.worker]).overlap_blocks == 0


def test_load_still_counts(router):
    first = route(router, PROMPT)
    for i in range(3):
        router.route([100 + i] * 64, workers=[first.rank.worker])
    assert route(router, PROMPT).rank != first.rank


def test_a_salt_hides_what_others_cached(router):
    route(router, PROMPT, workers=["a"], namespace=Namespace(salt="x"))
    assert route(router, PROMPT, workers=["a"]).overlap_blocks == 0
    salted = route(router, PROMPT, workers=["a"], namespace=Namespace(salt="x"))
    assert salted.overlap_blocks == 16


def test_models_are_kept_apart(clock):
    router = make_router(clock=clock, use_kv_events=False)
    for worker, model in (("a", "m"), ("b", "n"), ("c", "n")):
        router.add_worker(worker, model=model)
    assert route(router, PROMPT, model="m").rank == Rank("a")
    first = route(router, PROMPT, model="n")
    assert first.overlap_blocks == 0
    again = route(router, PROMPT, model="n")
    assert (again.rank, again.overlap_blocks) == (first.rank, 16)


def test_without_a_block_size_it_is_16():
    router = Router(RouterConfig(use_kv_events=False))
    router.add_worker("a")
    assert router.fleet_index.block_size_of("a") == 16
    assert route(router, PROMPT).prompt_blocks == 4


@pytest.mark.parametrize("is_audited", [False, True])
def test_events_are_rejected(is_audited):
    router = Router(RouterConfig(block_size=4, use_kv_events=False), random_=random.Random(0))
    if is_audited:
        Audit(router)
    router.add_worker("a")
    batch = EventBatch(events=(STORED,))
    sentence = r"cannot apply events of .*a.*: expected a router with use_kv_events=True"
    with pytest.raises(ConfigError, match=sentence):
        router.apply(Rank("a"), batch)
    with pytest.raises(ConfigError, match=sentence):
        router.apply_records(Rank("a"), read_payloads([codec.encode(batch)]))
    with pytest.raises(ConfigError, match=sentence):
        Follower(router, Rank("a"))
    assert len(router.index) == 0
