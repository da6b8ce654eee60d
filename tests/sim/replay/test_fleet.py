"""A fleet in virtual time: when requests come, where they go, what becomes of them."""

import numpy as np
import pytest

from kvplug.errors import ConfigError
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import EVENT_S, HOP_S, Arrivals, replay
from kvplug.sim.replay.policies import RoundRobin
from kvplug.sim.replay.workload import Documents, Unshared, Workload

SPECS = [EngineSpec(num_blocks=500)] * 3
RECIPE = Documents(num_requests=90, num_documents=4, document=400, own=(10, 60), answer=(1, 20))


class Telling(RoundRobin):
    """By turns; keeps what it was told, and when."""

    def __init__(self, specs, seed):
        super().__init__(specs, seed)
        self.chosen, self.first_tokens, self.finished, self.stored = {}, {}, {}, []

    def choose(self, number, request, now):
        self.chosen[number] = now
        return super().choose(number, request, now)

    def on_first_token(self, number, now):
        self.first_tokens[number] = now

    def on_finished(self, number, num_answer_tokens, now):
        super().on_finished(number, num_answer_tokens, now)
        self.finished[number] = now

    def on_cache_events(self, engine, events, now):
        self.stored += [(now, engine, event) for event in events]


def replayed(arrivals, workload=None, specs=SPECS, seed=0):
    policy = Telling(specs, seed)
    return replay(workload or RECIPE.make(0), specs, policy, arrivals, seed=seed), policy


def timed(workload, times):
    for request, time in zip(workload.requests, times, strict=True):
        request.arrival_s = time
    return workload


@pytest.mark.parametrize("arrivals", [Arrivals(clients=7), Arrivals(rate=20.0), Arrivals()])
def test_every_request_is_answered_and_the_policy_hears_of_it(arrivals):
    outcome, policy = replayed(arrivals)
    assert (outcome.ttft_s > 2 * HOP_S).all()
    assert (outcome.total_s >= outcome.ttft_s).all()
    for number, (arrived, ttft, total) in enumerate(
        zip(outcome.arrived_s, outcome.ttft_s, outcome.total_s, strict=True)
    ):
        assert policy.chosen[number] == arrived
        assert policy.first_tokens[number] == pytest.approx(arrived + ttft)
        assert policy.finished[number] == pytest.approx(arrived + total)
    assert policy.num_running == [0, 0, 0]


def test_one_request_alone_takes_hops_prefill_and_a_step_per_token():
    workload = Unshared(num_requests=1, prompt=1000, answer=5).make(0)
    outcome, policy = replayed(Arrivals(clients=1), workload)
    prefill = SPECS[0].time_model.step_s(num_prefill_tokens=1000, num_decodes=0)
    decode = SPECS[0].time_model.step_s(num_prefill_tokens=0, num_decodes=1)
    assert outcome.ttft_s[0] == pytest.approx(2 * HOP_S + prefill)
    assert outcome.total_s[0] == pytest.approx(2 * HOP_S + prefill + 4 * decode)
    ((told, engine, event),) = policy.stored
    assert told == pytest.approx(HOP_S + prefill + EVENT_S)
    assert (engine, event.removed, event.parent) == (0, [], None)
    assert event.stored.tolist() == [
        *workload.requests[0].blocks.tolist(), *workload.requests[0].answer_blocks.tolist()
    ]  # fmt: skip


def test_a_closed_loop_never_has_more_requests_than_clients():
    outcome, _ = replayed(Arrivals(clients=4))
    ends = outcome.arrived_s + outcome.total_s
    in_flight = [((outcome.arrived_s <= t) & (ends > t)).sum() for t in outcome.arrived_s]
    assert max(in_flight) == 4


def test_the_first_requests_may_come_in_a_loop_and_the_others_at_random():
    workload = Unshared(num_requests=2030, prompt=20, answer=1).make(0)
    arrivals = Arrivals(clients=4, rate=50.0, num_closed=30)
    outcome, _ = replayed(arrivals, workload)
    ends = outcome.arrived_s + outcome.total_s
    in_flight = [((outcome.arrived_s <= t) & (ends > t)).sum() for t in outcome.arrived_s[:30]]
    assert max(in_flight) == 4
    assert outcome.arrived_s[30] > ends[:30].max()
    assert 2000 / (outcome.arrived_s[-1] - ends[29]) == pytest.approx(50.0, rel=0.1)


def test_clients_before_random_times_need_requests():
    with pytest.raises(ConfigError, match="expected num_closed of at least 1, got 0"):
        Arrivals(clients=4, rate=50.0)
    workload = Unshared(num_requests=5, prompt=20, answer=1).make(0)
    outcome, _ = replayed(Arrivals(clients=4, rate=50.0, num_closed=9), workload)
    assert (outcome.total_s > 0).all()


def test_random_arrivals_have_their_rate_and_are_the_same_for_the_same_seed():
    workload = Unshared(num_requests=2000, prompt=20, answer=1).make(0)
    first, again = (replayed(Arrivals(rate=50.0), workload)[0] for _ in range(2))
    assert 2000 / first.arrived_s[-1] == pytest.approx(50.0, rel=0.1)
    np.testing.assert_array_equal(first.arrived_s, again.arrived_s)
    other, _ = replayed(Arrivals(rate=50.0), workload, seed=1)
    assert other.arrived_s[0] != first.arrived_s[0]


def test_a_log_is_replayed_as_fast_as_asked():
    times = [0.0, 0.5, 0.5, 4.0]
    workload = timed(Unshared(num_requests=4, prompt=20, answer=1).make(0), times)
    outcome, _ = replayed(Arrivals(speed=4.0), workload)
    assert outcome.arrived_s.tolist() == [0.0, 0.125, 0.125, 1.0]


def test_the_second_of_two_equal_prompts_is_found_if_it_goes_to_the_same_engine():
    (request,) = Unshared(num_requests=1, prompt=100, answer=1).make(0).requests
    twice = Workload(name="twice", block_size=16, requests=[request, request])
    same, _ = replayed(Arrivals(clients=1), twice, SPECS[:1])
    assert same.hit_tokens.tolist() == [0, 96]
    elsewhere, _ = replayed(Arrivals(clients=1), twice)
    assert elsewhere.hit_tokens.tolist() == [0, 0]
