"""What ranks are busy with, accounted for by the routing kernel and given back by ActiveLoad."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import Rank, Router, RouterConfig
from kvplug.kernels import costing

WORKERS = ("a", "b", "c")
prompts = st.lists(st.integers(1, 3), min_size=1, max_size=6)
requests = st.tuples(st.sampled_from(WORKERS), prompts)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(clock=None, **settings):
    config = RouterConfig(block_size=1, speculative_ttl_s=0.0, **settings)
    router = Router(config, clock=clock or Clock())
    for worker in WORKERS:
        router.add_worker(worker)
    return router


def seen(router, column):
    return router.load.ranks[:, column].tolist()


def require_counted(router, live, prefilling):
    """live: {id: (worker, tokens)}; prefilling: ids without a first token. Nothing is cached."""
    on = [[live[i] for i in live if live[i][0] == worker] for worker in WORKERS]
    waiting = [[live[i] for i in prefilling if live[i][0] == worker] for worker in WORKERS]
    blocks = [
        {tuple(tokens[: i + 1]) for _, tokens in mine for i in range(len(tokens))} for mine in on
    ]
    tokens_of = [sum(len(tokens) for _, tokens in mine) for mine in waiting]
    assert seen(router, costing.NUM_RUNNING) == [len(mine) for mine in on]
    assert seen(router, costing.NUM_WAITING) == [len(mine) for mine in waiting]
    assert seen(router, costing.PREFILL_TOKENS) == tokens_of
    assert seen(router, costing.COMING_BLOCKS) == tokens_of
    assert seen(router, costing.ACTIVE_BLOCKS) == [len(distinct) for distinct in blocks]
    in_context = [sum(len(tokens) for _, tokens in mine) for mine in on]
    assert seen(router, costing.CONTEXT_TOKENS) == in_context
    for number, waits in enumerate(seen(router, costing.WAITING_MS)):
        assert (waits > 0) == bool(waiting[number])


@given(st.lists(requests, max_size=10), st.data())
def test_load_is_counted_per_rank_and_given_back(started, data):
    router, live, prefilling = make_router(), {}, []
    for worker, tokens in started:
        request_id = router.route(tokens, workers=[worker]).request_id
        live[request_id] = (worker, tokens)
        prefilling.append(request_id)
        require_counted(router, live, prefilling)
    events = [(what, i) for i in live for what in ("first_token", "finish")]
    for what, request_id in data.draw(st.permutations(events)):
        if what == "finish":
            router.finish(request_id)
            live.pop(request_id)
        else:
            router.first_token(request_id)  # also of those that are over: it does nothing then
        prefilling = [i for i in prefilling if i != request_id]
        require_counted(router, live, prefilling)
    assert len(router.load) == 0


def test_the_oldest_request_is_the_one_that_is_computed():
    clock = Clock()
    router = make_router(clock)
    first = router.route([1] * 100, workers=["a"])
    clock.now_s += 0.005
    second = router.route([2] * 50, workers=["a"])
    assert second.predicted_ttft_ms - first.predicted_ttft_ms == 15.0 - 0.5 * 20
    router.first_token(first.request_id)
    assert seen(router, costing.FIRST_SINCE_MS)[0] == 1e3 * clock.now_s


def test_a_first_token_of_which_nobody_tells_is_presumed():
    clock = Clock()
    router = make_router(clock)
    decision = router.route([1] * 100, workers=["a"], reports_first_token=False)
    told = router.route([2] * 100, workers=["b"])
    assert decision.predicted_ttft_ms == told.predicted_ttft_ms == 22.0
    clock.now_s += 0.021
    router.load.expire(clock.now_s)
    assert seen(router, costing.NUM_WAITING) == [1, 1, 0]
    clock.now_s += 0.002
    router.load.expire(clock.now_s)
    assert seen(router, costing.NUM_WAITING) == [0, 1, 0]
    assert seen(router, costing.NUM_RUNNING) == [1, 1, 0]
    router.finish(decision.request_id, 5)
    assert seen(router, costing.NUM_RUNNING) == [0, 1, 0]


def test_lost_requests_expire():
    clock = Clock()
    router = make_router(clock, request_expiry_s=10.0)
    router.route([1], request_id="a")
    clock.now_s += 5
    router.route([2], request_id="b")
    clock.now_s += 5
    router.load.expire(clock.now_s)
    assert ("a" in router.load, "b" in router.load, router.load.num_expired) == (False, True, 1)
    assert sum(seen(router, costing.NUM_RUNNING)) == 1


def test_a_request_that_is_renewed_expires_later():
    clock = Clock()
    router = make_router(clock, request_expiry_s=10.0)
    for request_id in ("a", "b", "c"):
        router.route([1], request_id=request_id)
    router.finish("c")
    clock.now_s += 9
    router.renew("a")
    router.renew("c")  # it is over, and stays so
    clock.now_s += 9
    router.load.expire(clock.now_s)
    assert ["a" in router.load, "b" in router.load, "c" in router.load] == [True, False, False]
    clock.now_s += 1
    router.load.expire(clock.now_s)
    router.renew("a")  # too late
    assert (len(router.load), router.load.num_expired) == (0, 2)
    assert seen(router, costing.NUM_RUNNING) == [0, 0, 0]


def test_a_rank_that_goes_takes_its_load_along():
    router = make_router()
    router.route([1, 2], workers=["a"])
    router.route([1], workers=["c"])
    router.load.forget(0, 1000.0)
    assert seen(router, costing.ACTIVE_BLOCKS) == [0, 0, 1]
    assert seen(router, costing.WAITING_MS)[0] == seen(router, costing.RESIDENT_BLOCKS)[0] == 0
    assert len(router.load) == 1


def test_a_usual_capacity_is_the_median_of_those_that_are_known():
    router = make_router()
    assert router.load.usual_capacity([0, 1, 2]) == 0
    for worker, size in (("a", 100), ("c", 300)):
        router.set_cache_capacity(Rank(worker), size)
    assert router.load.usual_capacity([0, 1, 2]) == 300
    assert router.load.usual_capacity([0, 1]) == 100


def test_a_newcomer_is_taken_to_be_as_busy_as_the_fleet_usually_is():
    router = make_router()
    router.route([1])
    router.load.ranks[:, costing.USUAL_WAIT_MS] = 3.0, 6.0, 9.0
    router.remove_worker("c")
    router.add_worker("c")
    router.add_worker("d")
    router.route([1], workers=["d"])  # says nothing of where others should go
    router.route([1])
    # Each is 1 / 64 of the way to the wait that the last request found.
    usual = seen(router, costing.USUAL_WAIT_MS)
    assert usual[2] == pytest.approx(4.5, rel=0.05)
    assert usual[3] == pytest.approx(4.5, rel=0.2)


def test_a_rank_that_was_away_is_a_newcomer_again():
    clock = Clock()
    router = make_router(clock)
    router.route([1])
    router.load.ranks[:, costing.USUAL_WAIT_MS] = 3.0, 6.0, 90.0
    for _ in range(31):
        clock.now_s += 1.0
        router.finish(router.route([1], workers=["a", "b"]).request_id)
    before = seen(router, costing.USUAL_WAIT_MS)
    router.route([1])
    # From the mean of the others, not from its own 90: 1 / 64 of the way to no wait at all.
    usual = seen(router, costing.USUAL_WAIT_MS)
    assert usual[2] == pytest.approx((before[0] + before[1]) / 2 * 63 / 64)
