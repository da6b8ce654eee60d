"""A simulated engine in virtual time."""

import random

import pytest

from kvplug import Rank
from kvplug.errors import ConfigError
from kvplug.events import AllBlocksCleared, Namespace
from kvplug.hashing import as_tokens, seed_of
from kvplug.index.block_index import BlockIndex
from kvplug.sim.engine import SchedulerConfig, SimulatedEngine, TimeModel
from kvplug.vllm_hashes import event_id
from tests.test_package import loaded_by

RANK = Rank("w")


def small_engine(**sizes):
    defaults = {"num_gpu_blocks": 40, "block_size": 4, "max_model_len": 80, "max_num_seqs": 4}
    return SimulatedEngine(SchedulerConfig(**{**defaults, **sizes}))


def run(engine, now=0.0):
    steps = []
    while step := engine.step(now):
        steps.append(step)
        now = step.ended_at
    return steps


def answer(engine, prompt, max_tokens):
    request = engine.submit(prompt, max_tokens)
    run(engine)
    return request, request.token_ids[len(prompt) :]


def test_time_is_what_the_model_says():
    model = TimeModel(
        prefill_tokens_per_s=1000, decode_base_s=1, decode_per_sequence_s=2, step_overhead_s=4
    )
    engine = SimulatedEngine(time_model=model)
    for _ in range(2):
        engine.submit(range(500), 3)
    steps = run(engine, now=100.0)
    # The second prompt finds the blocks of the first in the same step: 500 - 496 are left.
    assert steps[0].ended_at == pytest.approx(100 + 4 + 0.504)
    assert [step.ended_at - step.started_at for step in steps[1:]] == pytest.approx([9, 9])


def test_tokens_come_with_the_step_and_the_last_says_so():
    engine = small_engine()
    engine.submit(range(8), 3)
    steps = run(engine)
    assert [len(step.emitted) for step in steps] == [1, 1, 1]
    assert [step.emitted[0].finish_reason for step in steps] == [None, None, "length"]
    assert engine.step(0.0) is None


def test_equal_prompts_get_equal_answers_from_every_engine():
    prompt = list(range(10))
    _, first = answer(small_engine(), prompt, 12)
    engine = small_engine(max_num_seqs=1)
    _, other = answer(engine, [7, *prompt], 12)
    _, second = answer(engine, prompt, 12)
    assert first == second != other


def test_a_second_turn_finds_the_first_answer():
    engine = small_engine()
    prompt = list(range(10))
    _, first_answer = answer(engine, prompt, 11)
    second, _ = answer(engine, [*prompt, *first_answer, 1, 2, 3], 1)
    assert second.num_cached_tokens == 20  # 10 + 11, without the last token: it was not computed


def test_a_reset_is_published_with_the_next_step():
    engine = small_engine()
    answer(engine, range(8), 1)
    assert engine.reset_prefix_cache()
    engine.submit(range(8), 1)
    [step] = run(engine)
    assert isinstance(step.events[0], AllBlocksCleared)
    assert step.batch().dp_rank == 0
    assert step.batch().ts == step.ended_at


def test_the_index_follows_the_engine_and_predicts_its_hits():
    engine, index, chance = small_engine(), BlockIndex(4), random.Random(1)
    index.add_rank(RANK)
    texts = [[chance.randrange(1000) for _ in range(60)] for _ in range(4)]
    predicted, found = [], []
    for _ in range(300):
        prompt = chance.choice(texts)[: chance.randrange(1, 60)]
        hashes = index.hasher.sequence_hashes(as_tokens(prompt), seed_of(Namespace()))
        depth = int(index.overlap(hashes, 0.0).depth[0])
        predicted.append(min(depth, (len(prompt) - 1) // 4) * 4)
        request = engine.submit(prompt, chance.randrange(1, 20))
        for step in run(engine):
            assert not index.apply(RANK, step.batch()).rejected
        found.append(request.num_cached_tokens)
        cached = {event_id(block_hash) for block_hash in engine.cache.pool.cached_hashes()}
        assert set(index.engine_hashes_of(RANK).tolist()) == cached
    assert predicted == found
    assert len(set(found)) > 5


def test_it_counts_what_vllm_counts():
    engine = small_engine()
    for _ in range(2):
        answer(engine, range(9), 2)
    assert (engine.cache.num_queried_tokens, engine.cache.num_hit_tokens) == (18, 8)
    assert (engine.num_prompt_tokens, engine.num_generated_tokens) == (18, 4)


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(0, 1), (1, 0), (79, 2), (81, 1)])
def test_requests_that_do_not_fit_are_rejected(num_prompt_tokens, max_tokens):
    with pytest.raises(ConfigError):
        small_engine().submit(range(num_prompt_tokens), max_tokens)


def test_steps_alternate():
    engine = small_engine()
    engine.submit(range(8), 1)
    with pytest.raises(RuntimeError, match="no step was begun"):
        engine.finish_step()
    engine.begin_step(0.0)
    with pytest.raises(RuntimeError, match="has not been finished"):
        engine.begin_step(0.0)


def test_virtual_time_needs_no_socket_no_loop_and_no_numba():
    loaded = loaded_by("from kvplug.sim.engine import SimulatedEngine; SimulatedEngine()")
    assert not loaded & {"asyncio", "zmq", "aiohttp", "numba", "numpy"}
