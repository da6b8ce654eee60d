"""What keeps equal tokens apart, on real vLLM: salt, LoRA, model, hash seed."""

import random
from contextlib import contextmanager

import pytest

from kvplug import Router, RouterConfig
from kvplug.ingest.event_thread import EventThread
from tests.engines.engine_pool import uses
from tests.engines.line_engine import Followed, line_engine

BLOCK_SIZE = 32

# It prefills at most two blocks in a step, and has a LoRA adapter.
CHUNKING = line_engine(
    "chunking", has_adapter=True, block_size=BLOCK_SIZE, max_num_batched_tokens=2 * BLOCK_SIZE
)
SEED_1 = line_engine("seed-1", hash_seed="1", block_size=BLOCK_SIZE)
FOUR_LAYERS = {
    block_size: line_engine(
        f"four-layers-{block_size}",
        block_size=block_size,
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 4},
    )
    for block_size in (32, 64)
}

pytestmark = uses(CHUNKING)


@pytest.fixture(scope="module")
def listener():
    listener = EventThread()
    listener.start()
    yield listener
    listener.stop()


@pytest.fixture(scope="module")
def router():
    return Router(RouterConfig(speculative_ttl_s=0.0))  # what events say, and nothing else


@pytest.fixture(scope="module")
def followed(engine_pool, router, listener):
    chunking = engine_pool.get(CHUNKING)
    router.add_worker(chunking.name, model="tiny-llama")
    return Followed(chunking, router, listener)


def tokens(seed, count):
    rnd = random.Random(seed)
    return [rnd.randrange(10, 4000) for _ in range(count)]


@pytest.mark.parametrize(
    "namespace",
    [
        {"salt": "tenant"},
        {"lora": "adapter"},
        {"lora": "adapter", "salt": "tenant"},
        {"lora": "adapter", "salt": "adapter"},
    ],
    ids=lambda namespace: "+".join(namespace.values()),
)
def test_chunks_and_decoded_blocks_inherit_the_namespace(followed, namespace):
    # The first chunk is two of six blocks; three more are decoded.
    prompt, chunking = tokens(str(namespace), 6 * BLOCK_SIZE + 5), followed.engine
    assert chunking.ask(prompt, max_tokens=3 * BLOCK_SIZE, **namespace) == [0]
    assert followed.apart() == (0, 0)
    [answer] = chunking.generated
    whole = prompt + answer
    assert followed.check_prediction([*whole, 7, 8], **namespace) == 9 * BLOCK_SIZE
    others = [{}, {"salt": "other"}, {"lora": "adapter", "salt": "other"}]
    assert [followed.check_prediction(whole, **other) for other in others] == [0, 0, 0]
    assert followed.apart() == (0, 0)
    assert dict(followed.follower.skipped) == {}


def test_random_namespaces_with_evictions_are_predicted_exactly(followed):
    rnd = random.Random(3)
    prefixes = [tokens(i, 4 * BLOCK_SIZE) for i in range(3)]
    namespaces = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "adapter"}]
    cached = []
    for i in range(40):
        prompt = rnd.choice(prefixes)[: rnd.randrange(1, 129)] + tokens(100 + i, rnd.randrange(70))
        cached.append(followed.check_prediction(prompt or [7], **rnd.choice(namespaces)))
    assert followed.apart() == (0, 0)
    assert len(set(cached)) > 3
    assert followed.follower.num_removed > 20
    assert len(followed.router.index_of(followed.rank).hash_spaces) == 1


@uses(SEED_1)
def test_another_hash_seed_is_a_hash_space_of_its_own(followed, engine_pool, listener):
    with beside(followed, listener, engine_pool.get(SEED_1), model="tiny-llama") as second:
        check_both(followed, second)
        assert len(followed.router.index_of(followed.rank).hash_spaces) == 2


@pytest.mark.parametrize(
    "block_size", [pytest.param(size, marks=uses(recipe)) for size, recipe in FOUR_LAYERS.items()]
)
def test_another_model_is_kept_apart_whatever_its_block_size(
    followed, engine_pool, listener, block_size
):
    engine = engine_pool.get(FOUR_LAYERS[block_size])
    with beside(followed, listener, engine, model="four-layers") as second:
        check_both(followed, second)
        # The model is not in vLLM's hashes: equal blocks of two models have the same names.
        num_same = len(followed.engine.blocks & engine.blocks)
        assert (num_same > 0) == (block_size == BLOCK_SIZE)
        index = followed.router.index_of(second.rank)
        assert index.block_size == block_size
        assert index is not followed.router.index_of(followed.rank)


@contextmanager
def beside(followed, listener, engine, *, model):
    """A second engine as a worker of the same router; gone afterwards, as other tests share it."""
    followed.router.add_worker(engine.name, model=model)
    second = Followed(engine, followed.router, listener)
    try:
        yield second
    finally:
        listener.unfollow(second.follower)
        followed.router.remove_worker(engine.name)


def check_both(followed, second):
    """The same prompts on both, in part: each is predicted for itself."""
    prompt = tokens(second.engine.name, 5 * BLOCK_SIZE)
    followed.engine.ask(prompt[: 2 * BLOCK_SIZE + 1]), second.engine.ask(prompt)
    for part in (prompt, [*prompt, 9], prompt[:40], tokens(5, 70)):
        for salt in ("", "tenant"):
            followed.check_prediction(part, salt=salt)
            second.check_prediction(part, salt=salt)
    assert second.check_prediction([*prompt, 9, 9]) >= 4 * BLOCK_SIZE
    assert (followed.apart(), second.apart()) == ((0, 0), (0, 0))
    assert (dict(followed.follower.skipped), dict(second.follower.skipped)) == ({}, {})
