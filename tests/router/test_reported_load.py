"""What an engine reports of its load, beside what the router has sent there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import ConfigError, UnknownRankError
from kvplug.kernels import costing, peer_load

COLUMNS = [
    costing.NUM_RUNNING,
    costing.NUM_WAITING,
    costing.PREFILL_TOKENS,
    costing.ACTIVE_BLOCKS,
]
NO_LOAD = [0.0] * 4


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(clock=None, **settings):
    config = RouterConfig(block_size=16, speculative_ttl_s=0.0, **settings)
    router = Router(config, clock=clock or Clock())
    for worker in ("a", "b"):
        router.add_worker(worker)
    return router


def load_of(router, number=0):
    return router.load.ranks[number, COLUMNS].tolist()


def test_what_exceeds_the_routers_own_requests_is_others_load():
    router = make_router()
    router.route([1] * 160, request_id="r", workers=["a"])
    assert load_of(router) == [1, 1, 160, 10]
    router.set_reported_load(
        Rank("a"), num_running=3, num_waiting=2, waiting_tokens=500, active_blocks=25
    )
    assert load_of(router) == [5, 2, 500, 25]
    router.finish("r")
    assert load_of(router) == [4, 1, 340, 15]  # until the next report
    router.set_reported_load(
        Rank("a"), num_running=0, num_waiting=0, waiting_tokens=0, active_blocks=0
    )
    assert load_of(router) == NO_LOAD
    assert router.load.ranks[0, costing.WAITING_MS] == 0


def test_a_report_of_the_routers_own_requests_adds_nothing():
    router = make_router()
    router.route([1] * 160, request_id="r", workers=["a"])
    before = router.load.ranks.tolist()
    reports = {"num_running": 1, "num_waiting": 0, "waiting_tokens": 160, "active_blocks": 10}
    router.set_reported_load(Rank("a"), **reports)
    assert router.load.ranks.tolist() == before
    router.set_reported_load(Rank("a"), num_running=0, num_waiting=1)
    assert router.load.ranks.tolist() == before
    router.set_reported_load(Rank("a"))
    assert router.load.ranks.tolist() == before


def test_what_a_report_leaves_out_is_the_routers_own():
    router = make_router()
    router.set_reported_load(Rank("a"), num_running=3, waiting_tokens=50, active_blocks=9)
    router.set_reported_load(Rank("a"), active_blocks=4)
    assert load_of(router) == [0, 0, 0, 4]


@pytest.mark.parametrize("settings", [{}, {"cost": "blocks"}, {"mode": "least_loaded"}])
def test_a_request_avoids_the_load_of_others(settings):
    router = make_router(**settings)
    router.set_reported_load(
        Rank("a"), num_running=4, num_waiting=1, waiting_tokens=900, active_blocks=99
    )
    for _ in range(10):
        decision = router.route([1] * 32)
        assert decision.rank == Rank("b")
        router.finish(decision.request_id)


def test_what_others_wait_for_is_computed_meanwhile():
    clock = Clock()
    router = make_router(clock)
    alone = router.peek([1] * 160, workers=["b"]).predicted_ttft_ms
    router.set_reported_load(Rank("a"), waiting_tokens=1000)  # 200 ms
    ask = lambda: router.peek([1] * 160, workers=["a"]).predicted_ttft_ms - alone  # noqa: E731
    assert ask() == pytest.approx(200)
    clock.now_s += 0.15
    assert ask() == pytest.approx(50)
    clock.now_s += 0.5
    assert ask() == pytest.approx(0)


def test_a_request_behind_others_is_computed_after_them():
    clock = Clock()
    router = make_router(clock)
    router.set_reported_load(Rank("a"), waiting_tokens=1000)  # 200 ms
    router.route([1] * 160, request_id="r", workers=["a"])  # 32 ms
    waiting = lambda: router.load.ranks[0, costing.WAITING_MS]  # noqa: E731
    assert waiting() == pytest.approx(232)
    clock.now_s += 0.1
    router.set_reported_load(Rank("a"), waiting_tokens=660)  # 160 of them ours
    assert waiting() == pytest.approx(132)
    clock.now_s += 0.1
    router.set_reported_load(Rank("a"), waiting_tokens=160)
    assert router.load.ranks[0, costing.FIRST_SINCE_MS] == 1e3 * clock.now_s
    assert router.load.ranks[0, costing.FIRST_MS] == pytest.approx(32)
    router.first_token("r")
    assert waiting() == 0


def test_others_that_came_later_are_computed_later():
    clock = Clock()
    router = make_router(clock)
    router.route([1] * 160, request_id="r", workers=["a"])
    clock.now_s += 0.01
    router.set_reported_load(Rank("a"), waiting_tokens=1160)
    assert router.load.ranks[0, costing.FIRST_MS] == pytest.approx(32)
    assert router.load.ranks[0, costing.FIRST_SINCE_MS] == 1e6
    clock.now_s += 0.02
    router.first_token("r")
    assert router.load.ranks[0, costing.FIRST_MS] == pytest.approx(200)
    assert router.load.ranks[0, costing.FIRST_SINCE_MS] == 1e3 * clock.now_s


def test_others_who_wait_for_nobody_knows_how_long_do_not_stop_the_clock():
    clock = Clock()
    router = make_router(clock)
    router.set_reported_load(Rank("a"), num_waiting=3)
    alone = router.peek([1] * 160, workers=["a"]).predicted_ttft_ms
    router.route([1] * 160, workers=["a"])
    ask = lambda: router.peek([1] * 160, workers=["a"]).predicted_ttft_ms - alone  # noqa: E731
    assert ask() == pytest.approx(32)
    clock.now_s += 0.02
    assert ask() == pytest.approx(12)


def test_a_rank_that_leaves_takes_the_load_of_others_along():
    router = make_router()
    router.set_reported_load(Rank("a"), num_running=3, waiting_tokens=50, active_blocks=9)
    router.route([1] * 32, workers=["a"])
    router.remove_worker("a")
    router.add_worker("c")
    assert router.fleet_index.numbers.number_of(Rank("c")) == 0
    assert load_of(router) == NO_LOAD


@pytest.mark.parametrize(
    "bad",
    [{"num_running": -1}, {"num_waiting": 1.5}, {"active_blocks": True}, {"num_running": "2"}],
)
def test_a_report_that_cannot_be_changes_nothing(bad):
    router = make_router()
    router.set_reported_load(Rank("a"), num_running=2)
    with pytest.raises(ConfigError, match="cannot set the reported load: expected "):
        router.set_reported_load(Rank("a"), **bad)
    with pytest.raises(UnknownRankError):
        router.set_reported_load(Rank("z"), num_running=2)
    assert load_of(router) == [2, 0, 0, 0]


NAMES = ("num_running", "num_waiting", "waiting_tokens", "active_blocks")
NOTHING = dict.fromkeys(NAMES, 0)
counts = st.none() | st.integers(0, 400)
reports = st.fixed_dictionaries(dict.fromkeys(NAMES, counts))


@given(st.lists(reports | st.sampled_from(["route", "first_token", "finish"]), max_size=20))
def test_load_is_never_below_0_and_ends_at_0(steps):
    clock, live = Clock(), []
    router = make_router(clock)
    for number, step in enumerate(steps):
        clock.now_s += 0.01
        if isinstance(step, dict):
            router.set_reported_load(Rank("a"), **step)
        elif step == "route":
            live.append(router.route([number] * 48, workers=["a"]).request_id)
        elif live and step == "first_token":
            router.first_token(live[0])
        elif live:
            router.finish(live.pop(0))
        assert min(load_of(router)) >= 0
        running, waiting, *_ = load_of(router)
        assert waiting <= running
        assert router.peek([1], workers=["a"]).predicted_ttft_ms >= 0
    for request_id in live:
        router.finish(request_id)
    router.set_reported_load(Rank("a"), **NOTHING)
    assert load_of(router) == NO_LOAD
    busy = [costing.WAITING_MS, costing.COMING_BLOCKS, costing.FIRST_MS]
    assert router.load.ranks[0, busy].tolist() == [0.0, 0.0, 0.0]


def test_what_peers_have_sent_is_not_the_load_of_others():
    router = Router(RouterConfig(block_size=4), clock=lambda: 0.0)
    router.add_worker("a")
    rows = np.zeros((2, 1, peer_load.ROW_WIDTH))
    rows[1, 0, [costing.NUM_RUNNING, costing.NUM_WAITING]] = 2.0, 1.0
    router.route(range(40))
    with router.locked():
        router.shared_load.take(rows.reshape(-1), 0, 2, np.zeros(1, dtype=np.int64))
    for _ in range(2):
        router.set_reported_load(Rank("a"), num_running=3, num_waiting=1)
        assert router.load.ranks[0, costing.NUM_RUNNING] == 4.0  # the engine has one of others
        assert router.load.ranks[0, costing.NUM_WAITING] == 2.0


def test_peers_are_shown_ones_own_load_without_that_of_others():
    router = Router(RouterConfig(block_size=4))
    router.add_worker("a")
    router.route([1] * 40, request_id="r")
    router.set_reported_load(Rank("a"), num_running=5, num_waiting=2)
    slots, rows = np.zeros(1, dtype=np.int64), np.zeros(peer_load.ROW_WIDTH)
    assert router.load.show_own(slots, rows)
    assert rows[costing.NUM_RUNNING] == 1
    assert not router.load.show_own(slots, rows), "nothing has changed since"
