"""Each router mode, and what it does where it finds nothing."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import Rank, Router, RouterConfig
from kvplug.router.policies import draw_two
from tests.router.test_core import Clock

PROMPT = list(range(64))


def make_router(mode, *workers, dp_size=1, seed=0):
    config = RouterConfig(block_size=4, mode=mode)
    router = Router(config, clock=Clock(), random_=random.Random(seed))
    for worker in workers:
        router.add_worker(worker, dp_size=dp_size)
    return router


def chosen(router, number=1, **options):
    return [router.route(PROMPT, **options).rank.worker for _ in range(number)]


def test_random_takes_any_whatever_its_load():
    router = make_router("random", "a", "b")
    counts = Counter(chosen(router, 200))
    assert 60 < counts["a"] < 140


def test_least_loaded_takes_the_fewest_requests_in_flight():
    router = make_router("least_loaded", "a", "b", "c")
    assert sorted(chosen(router, 3)) == ["a", "b", "c"]
    first = router.route(PROMPT)
    router.finish(first.request_id)
    assert Counter(chosen(router, 6)) == {"a": 2, "b": 2, "c": 2}


def test_power_of_two_takes_the_less_loaded_of_two():
    router = make_router("power_of_two", "a", "b", "c", "d")
    counts = Counter(chosen(router, 400))
    assert max(counts.values()) - min(counts.values()) < 20  # at random it would be about 40


@given(st.lists(st.integers(0, 50), unique=True, min_size=1), st.integers(0, 99))
def test_two_different_candidates_are_drawn_and_no_others(numbers, seed):
    drawn = draw_two(np.array(sorted(numbers)), random.Random(seed)).tolist()
    assert len(set(drawn)) == min(2, len(numbers))
    assert set(drawn) <= set(numbers)


def test_power_of_two_is_content_with_one():
    assert chosen(make_router("power_of_two", "a"), 2) == ["a", "a"]


def test_a_session_stays_and_others_stay_when_a_worker_leaves():
    router = make_router("rendezvous_hash", "a", "b", "c")
    sessions = [f"session-{i}" for i in range(300)]
    before = {s: chosen(router, session=s)[0] for s in sessions}
    assert all(60 < count < 140 for count in Counter(before.values()).values())
    assert {s: chosen(router, session=s)[0] for s in sessions} == before
    router.remove_worker("b")
    after = {s: chosen(router, session=s)[0] for s in sessions}
    assert all(after[s] == worker for s, worker in before.items() if worker != "b")
    router.add_worker("b")
    assert {s: chosen(router, session=s)[0] for s in sessions} == before


def test_the_order_in_which_workers_came_does_not_matter():
    routers = [make_router("rendezvous_hash", *order) for order in ("abc", "cab")]
    for number in range(50):
        assert len({chosen(router, session=f"s{number}")[0] for router in routers}) == 1


def test_any_text_can_be_a_session():
    assert chosen(make_router("rendezvous_hash", "a"), session="\ud800") == ["a"]


@pytest.mark.parametrize("mode", ["rendezvous_hash", "direct"])
def test_without_session_or_worker_the_least_loaded_gets_it(mode):
    router = make_router(mode, "a", "b")
    assert sorted(chosen(router, 2)) == ["a", "b"]


def test_direct_takes_the_worker_and_its_less_loaded_rank():
    router = make_router("direct", "a", "b", dp_size=2)
    ranks = [router.route(PROMPT, worker="b").rank for _ in range(2)]
    assert sorted(ranks) == [Rank("b", 0), Rank("b", 1)]
    assert router.route(PROMPT, worker="b", dp_rank=1).rank == Rank("b", 1)


@pytest.mark.parametrize(
    "mode",
    ["random", "round_robin", "direct", "least_loaded", "power_of_two", "rendezvous_hash", "kv"],
)
def test_in_every_mode_load_is_counted_and_goes_to_zero(mode):
    router = make_router(mode, "a", "b")
    decisions = [router.route(PROMPT, session="s") for _ in range(5)]
    assert len(router.load) == 5
    for decision in decisions:
        router.first_token(decision.request_id)
        router.finish(decision.request_id)
    assert len(router.load) == len(router.load.active) == 0
