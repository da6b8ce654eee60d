"""Who runs in a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import ConfigError
from kvplug.sim.kv_cache import KvCache
from kvplug.sim.request import Request
from kvplug.sim.scheduler import Scheduler, SchedulerConfig


def make(**sizes):
    defaults = {
        "num_gpu_blocks": 20,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    config = SchedulerConfig(**{**defaults, **sizes})
    cache = KvCache(config.num_gpu_blocks, config.block_size, config.max_model_len)
    return Scheduler(config, cache)


def add(scheduler, name, num_tokens, max_tokens=4):
    start = 1000 * ord(name)
    request = Request(name, range(start, start + num_tokens), max_tokens, block_size=4)
    scheduler.add(request)
    return request


def step(scheduler):
    """One step; returns (request, tokens) of each chunk, and the requests that got a token."""
    plan = scheduler.plan()
    chunks = [(chunk.request.request_id, chunk.num_tokens) for chunk in plan.chunks]
    emitted = scheduler.complete(plan, lambda request: request.num_tokens)
    return chunks, [token.request.request_id for token in emitted], plan.preempted


def test_long_prompts_are_chunked_and_decodes_go_first():
    scheduler = make()
    add(scheduler, "a", 10)
    add(scheduler, "b", 20)
    assert step(scheduler)[:2] == ([("a", 10), ("b", 6)], ["a"])
    assert step(scheduler)[:2] == ([("a", 1), ("b", 14)], ["a", "b"])
    assert step(scheduler)[:2] == ([("a", 1), ("b", 1)], ["a", "b"])


def test_no_more_run_than_max_num_seqs():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=1)
    assert step(scheduler)[0] == [("a", 2), ("b", 2)]
    assert step(scheduler)[0] == [("c", 2)]


def test_a_prompt_waits_until_the_whole_of_it_fits_and_those_behind_it_wait_too():
    scheduler = make(num_gpu_blocks=17, max_num_batched_tokens=64)
    add(scheduler, "a", 40, max_tokens=2)
    add(scheduler, "b", 40, max_tokens=1)
    add(scheduler, "c", 4, max_tokens=1)
    assert step(scheduler)[0] == [("a", 40)]
    assert step(scheduler)[1] == ["a"]
    assert step(scheduler)[0] == [("b", 40), ("c", 4)]


def test_the_last_admitted_is_preempted_and_starts_over_at_the_head_of_the_queue():
    scheduler = make(num_gpu_blocks=17, max_num_batched_tokens=64, max_num_seqs=2)
    first = add(scheduler, "a", 31, max_tokens=20)
    second = add(scheduler, "b", 32, max_tokens=20)
    third = add(scheduler, "c", 4, max_tokens=1)
    assert step(scheduler)[2] == []  # 8 + 8 of 16 blocks
    chunks, emitted, preempted = step(scheduler)
    assert (chunks, emitted, preempted) == ([("a", 1)], ["a"], [second])
    assert list(scheduler.waiting) == [second, third]
    assert (second.num_computed, second.num_preemptions) == (0, 1)
    assert second.num_output_tokens == 1
    while first in scheduler.running:
        step(scheduler)
    chunks, _, _ = step(scheduler)
    assert chunks[0] == ("b", 33 - 3 * 4)  # three of its blocks are still there
    assert second.num_cached_tokens == 0  # what it found when it came


def test_nothing_is_admitted_in_a_step_that_preempted():
    scheduler = make(num_gpu_blocks=17, max_num_batched_tokens=64)
    add(scheduler, "a", 31, max_tokens=20)
    add(scheduler, "b", 32, max_tokens=20)
    step(scheduler)
    add(scheduler, "c", 2)
    chunks, _, preempted = step(scheduler)
    assert chunks == [("a", 1)]
    assert len(preempted) == 1


def test_a_dropped_request_gives_its_blocks_back_even_while_its_step_runs():
    scheduler = make()
    dropped, kept = add(scheduler, "a", 8), add(scheduler, "b", 8)
    plan = scheduler.plan()
    assert scheduler.drop(dropped)
    assert not scheduler.drop(dropped)
    emitted = scheduler.complete(plan, lambda request: 0)
    assert [token.request for token in emitted] == [kept]
    assert scheduler.drop(kept)
    assert scheduler._cache.num_free == 19


def test_an_answer_ends_at_max_model_len():
    scheduler = make()
    request = add(scheduler, "a", 60, max_tokens=100)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert request.num_tokens == 64


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    num_gpu_blocks=st.integers(17, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 70),
)
def test_every_request_gets_its_answer(lengths, num_gpu_blocks, max_num_seqs, budget):
    scheduler = make(
        num_gpu_blocks=num_gpu_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    requests = [add(scheduler, chr(65 + i), *both) for i, both in enumerate(lengths)]
    while scheduler.running or scheduler.waiting:
        chunks, _, _ = step(scheduler)
        assert 0 < sum(tokens for _, tokens in chunks) <= budget
        assert len(scheduler.running) <= max_num_seqs
    assert [request.num_output_tokens for request in requests] == [most for _, most in lengths]
    assert scheduler._cache.num_free == num_gpu_blocks - 1


def test_sizes_that_cannot_work_are_rejected():
    with pytest.raises(ConfigError, match="num_gpu_blocks must be at least 17, for one request"):
        make(num_gpu_blocks=16)
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        make(block_size=0)
