"""The fast engine against the exact one: the same requests at the same times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.sim.engine import SchedulerConfig, SimulatedEngine
from kvplug.sim.engine_config import TimeModel
from kvplug.sim.replay.engine import EngineSpec, Job, ReplayEngine
from kvplug.sim.replay.workload import Conversations, Documents, Request, Unshared

SIZE, TIME = 16, TimeModel()


def tokens_of(request):
    """Token ids that share whatever the blocks share."""
    # Each token has other bits of the hash: two blocks are not equal by chance.
    tokens = [(int(block) >> i) % 30_000 for block in request.blocks for i in range(SIZE)]
    return tokens + [1] * (request.num_tokens - len(tokens))


def on_simulated(requests, times, num_blocks, max_num_seqs):
    """[(first token at, done at, cached tokens)] of each request."""
    config = SchedulerConfig(
        num_gpu_blocks=num_blocks + 1, block_size=SIZE, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512, max_model_len=2_000,
    )  # fmt: skip
    engine, now, left = SimulatedEngine(config, TIME), 0.0, list(zip(times, requests, strict=True))
    outcome = {}
    while left or engine.has_requests:
        if not engine.has_requests:
            now = max(now, left[0][0])
        while left and left[0][0] <= now:
            _, request = left.pop(0)
            name = str(len(outcome))
            outcome[name] = [0.0, 0.0, 0]
            engine.submit(tokens_of(request), request.num_answer_tokens, request_id=name)
        step = engine.step(now)
        now = step.ended_at
        for token in step.emitted:
            mine = outcome[token.request.request_id]
            if token.request.num_output_tokens == 1:
                mine[0], mine[2] = now, token.request.num_cached_tokens
            if token.finish_reason:
                mine[1] = now
    return [tuple(mine) for mine in outcome.values()]


def on_replayed(requests, times, num_blocks, max_num_seqs):
    spec = EngineSpec(
        num_blocks=num_blocks, block_size=SIZE, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512, time_model=TIME,
    )  # fmt: skip
    engine, now, left = ReplayEngine(spec), 0.0, list(zip(times, requests, strict=True))
    outcome = [[0.0, 0.0, 0] for _ in requests]
    while left or engine.is_busy:
        if not engine.is_busy:
            now = max(now, left[0][0])
        while left and left[0][0] <= now:
            request = left.pop(0)[1]
            engine.waiting.append(Job(request, len(requests) - len(left) - 1))
        step = engine.step(now)
        now = step.ends_at
        for job in step.first_tokens:
            outcome[job.number][0], outcome[job.number][2] = now, job.num_hit_tokens
        for job in step.finished:
            outcome[job.number][1] = now
    return [tuple(mine) for mine in outcome]


specs = st.one_of(
    st.builds(
        Documents, num_requests=st.just(12), num_documents=st.integers(1, 4),
        document=st.just((40, 900)), own=st.just((1, 70)), answer=st.just((1, 30)),
    ),
    st.builds(
        Unshared, num_requests=st.just(12), prompt=st.just((1, 900)), answer=st.just((1, 30))
    ),
)  # fmt: skip


@given(specs, st.integers(0, 99), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([2, 100]))
def test_with_room_for_all_both_engines_agree_to_the_step(spec, seed, gap_s, max_num_seqs):
    requests = spec.make(seed).requests
    times = np.cumsum(np.random.default_rng(seed).exponential(gap_s, len(requests))).tolist()
    exact = on_simulated(requests, times, 5000, max_num_seqs)
    fast = on_replayed(requests, times, 5000, max_num_seqs)
    np.testing.assert_allclose(fast, exact, rtol=1e-9)


@pytest.mark.parametrize("num_blocks", [150, 250])
def test_with_a_full_cache_they_agree_on_average(num_blocks):
    """The exact engine takes blocks for an answer as it grows, the fast one all at once."""
    spec = Documents(num_requests=300, num_documents=5, document=800, own=(20, 60), answer=(4, 40))
    requests = spec.make(3).requests
    times = np.cumsum(np.random.default_rng(3).exponential(0.05, len(requests))).tolist()
    exact = np.array(on_simulated(requests, times, num_blocks, 100))
    fast = np.array(on_replayed(requests, times, num_blocks, 100))
    since = np.array(times)
    mean_exact = (exact[:, :2] - since[:, None]).mean(axis=0)
    mean_fast = (fast[:, :2] - since[:, None]).mean(axis=0)
    np.testing.assert_allclose(mean_fast, mean_exact, rtol=0.1)
    assert fast[:, 2].mean() == pytest.approx(exact[:, 2].mean(), rel=0.1)


def test_events_tell_what_the_cache_holds():
    spec = EngineSpec(num_blocks=60, block_size=SIZE)
    workload = Conversations(num_requests=40, num_live=3, num_turns=5, turn=50, answer=40)
    engine, held, now = ReplayEngine(spec), set(), 0.0
    for number, request in enumerate(workload.make(1).requests):
        engine.waiting.append(Job(request, number))
        while engine.is_busy:
            step = engine.step(now)
            now = step.ends_at
            for removed, stored, parent, *_ in step.events:
                assert held.issuperset(removed)
                held -= set(removed)
                assert parent is None or parent in held
                assert held.isdisjoint(stored.tolist())
                held |= set(stored.tolist())
            assert len(held) == engine.cache.num_cached <= spec.num_blocks


class TestHostMemory:
    SPEC = EngineSpec(num_blocks=4, block_size=16, host_blocks=6, host_load_s=0.5)

    @staticmethod
    def run(engine, blocks):
        """(hit tokens, seconds, events) of a prompt of these blocks and a token."""
        nothing = np.zeros(0, dtype=np.uint64)
        job = Job(Request(np.array(blocks, np.uint64), 16 * len(blocks) + 1, 1, nothing), 0)
        engine.waiting.append(job)
        step = engine.step(0.0)
        return job.num_hit_tokens, step.ends_at, step.events[0]

    def test_what_the_device_evicts_is_loaded_from_there(self):
        engine = ReplayEngine(self.SPEC)
        assert self.run(engine, [1, 2, 3])[0] == 0
        _, computing_s, event = self.run(engine, [4, 5, 6])
        assert event.removed == [3, 2]
        assert event.offloaded == [(2, 1), (3, 2)]
        hits, seconds, event = self.run(engine, [1, 2, 3])
        assert hits == 48
        assert event.stored.tolist() == [2, 3]
        assert event.parent == 1
        assert 1.0 < seconds < 1.0 + computing_s

    def test_it_is_bounded_too(self):
        engine = ReplayEngine(self.SPEC)
        dropped = [self.run(engine, [n, n + 1, n + 2])[2].dropped for n in range(10, 40, 3)]
        assert sum(map(len, dropped)) == 20
        assert self.run(engine, [10, 11, 12])[0] == 0

    def test_without_it_nothing_is_said_of_it(self):
        engine = ReplayEngine(EngineSpec(num_blocks=4))
        events = [self.run(engine, [n, n + 1, n + 2])[2] for n in (1, 4, 1)]
        assert not any(event.offloaded or event.dropped for event in events)
