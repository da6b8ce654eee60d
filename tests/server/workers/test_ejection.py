"""Workers that fail again and again, alone and in the router."""

import pytest

from kvplug.server.workers import ejection
from kvplug.server.workers.ejection import Ejections
from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, routing
from tests.waiting import until

BOTH = frozenset("ab")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 100.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(ejection, "time", clock)
    return clock


def fail(ejections, worker, times=1):
    return [ejections.note_failure(worker) for _ in range(times)]


def test_only_failures_in_a_row_count(clock):
    ejections = Ejections(3, 5.0)
    for _ in range(4):
        assert fail(ejections, "a", 2) == [False, False]
        assert not ejections.note_success("a")
    assert fail(ejections, "a", 3) == [False, False, True]
    assert ejections.usable(BOTH) == {"b"}
    assert (ejections.left_s("a"), ejections.left_s("b")) == (5.0, None)


def test_one_request_tries_when_the_time_is_over(clock):
    ejections = Ejections(1, 5.0)
    fail(ejections, "a")
    clock.now_s += 5.0
    assert ejections.usable(BOTH) == BOTH
    ejections.note_sent("a")
    assert ejections.usable(BOTH) == {"b"}
    assert ejections.note_success("a")
    assert ejections.usable(BOTH) == BOTH


def test_each_trial_that_fails_doubles_the_time_up_to_a_limit(clock):
    ejections, times = Ejections(1, 5.0), []
    for _ in range(7):
        fail(ejections, "a")
        times.append(ejections.left_s("a"))
        clock.now_s += times[-1]
        ejections.note_sent("a")
    assert times == [5, 10, 20, 40, 80, 80, 80]


def test_the_last_worker_is_never_left_out(clock):
    ejections = Ejections(1, 5.0)
    fail(ejections, "a")
    assert ejections.usable(frozenset("a")) == {"a"}
    fail(ejections, "b")
    assert ejections.usable(BOTH) == BOTH


def test_a_request_without_an_end_does_not_keep_a_worker_out(clock):
    ejections = Ejections(1, 5.0)
    fail(ejections, "a")
    clock.now_s += 5.0
    ejections.note_sent("a")
    clock.now_s += 5.0
    assert ejections.usable(BOTH) == BOTH


def test_never_is_never(clock):
    ejections = Ejections(0, 5.0)
    assert not any(fail(ejections, "a", 100))
    assert ejections.usable(BOTH) == BOTH


async def ask(client, **more):
    async with client.post("/v1/completions", json={**COMPLETION, **more}) as response:
        return response.status, await response.read()


@pytest.mark.parametrize(("behaviour", "more"), [("half", {"stream": True}), ("fail", {})])
async def test_a_worker_that_fails_is_left_out_and_comes_back(behaviour, more):
    bad, good = Engine(), Engine()
    bad.behaviour = behaviour
    settings = {"mode": "round_robin", "eject_after": 2, "ejection_s": 0.5}
    async with routing(bad, good, **settings) as (service, client):
        ejected, counts = next(iter(service.proxy.counts.items()))
        while not counts.num_ejections:
            await ask(client, **more)
        num_before = bad.num_requests
        assert num_before == 2
        for _ in range(4):
            assert (await ask(client, **more))[0] == 200
        assert bad.num_requests == num_before
        async with client.get("/health") as response:
            [worker, other] = (await response.json())["workers"]
        assert (worker["state"], other["ejected_for_s"]) == ("up", None)
        assert 0 < worker["ejected_for_s"] <= 0.5
        async with client.get("/metrics") as response:
            line = f'kvplug_worker_ejections_total{{worker="{ejected}"}} 1.0'
            assert line in await response.text()
        bad.behaviour = "ok"
        left_s = service.fleet.ejections.left_s
        await until(lambda: left_s(ejected) == 0, "it may be tried")
        while bad.num_requests == num_before:
            assert (await ask(client, **more))[0] == 200
        assert left_s(ejected) is None


async def test_the_only_worker_is_asked_however_often_it_fails():
    engine = Engine()
    engine.behaviour = "fail"
    async with routing(engine, eject_after=1) as (_, client):
        for _ in range(3):
            assert (await ask(client))[0] == 500
    assert engine.num_requests == 3
