"""Blocks of requests: hits, allocation, what is published."""

import msgspec
import pytest

from kvplug import codec
from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Namespace
from kvplug.sim.kv_cache import KvCache
from kvplug.sim.request import Request
from kvplug.vllm_hashes import Lora, event_id

BLOCK = 4


def request(tokens, **more):
    return Request("r", tokens, 100, block_size=BLOCK, **more)


@pytest.fixture
def cache():
    return KvCache(num_blocks=9, block_size=BLOCK, max_model_len=32)


def admit(cache, request, num_tokens=None):
    """Admit with its hits; the whole prompt unless told otherwise. Returns the hits in tokens."""
    hits = cache.find_hits(request)
    missing = request.num_tokens - len(hits) * BLOCK
    assert cache.allocate(request, num_tokens or missing, hits)
    request.num_computed = len(hits) * BLOCK + (num_tokens or missing)
    return len(hits) * BLOCK


def ids(request, *numbers):
    return tuple(event_id(request.block_hashes[number]) for number in numbers)


def test_the_last_token_is_always_computed(cache):
    first = request(range(8))
    admit(cache, first)
    assert admit(cache, request(range(8))) == 4
    assert admit(cache, request(range(9))) == 8


def test_salt_and_adapter_separate(cache):
    plain = request(range(4))
    admit(cache, plain)
    cache.free(plain)
    for other in (request(range(8), salt="s"), request(range(8), lora=Lora("a", "/a"))):
        assert cache.find_hits(other) == []
    assert cache.find_hits(request(range(8))) != []


def test_a_chunk_stores_the_blocks_that_it_fills(cache):
    chunked = request(range(11))
    admit(cache, chunked, 6)
    assert cache.take_events() == (
        BlockStored(
            block_hashes=ids(chunked, 0),
            token_ids=(0, 1, 2, 3),
            block_size=BLOCK,
            namespace=Namespace(),
        ),
    )
    assert cache.allocate(chunked, 5)
    assert cache.take_events() == (
        BlockStored(
            block_hashes=ids(chunked, 1),
            token_ids=(4, 5, 6, 7),
            block_size=BLOCK,
            parent=ids(chunked, 0)[0],
        ),
    )


def test_the_salt_is_named_with_the_first_block_only_and_the_adapter_with_each(cache):
    salted = request(range(8), salt="s")
    admit(cache, salted, 4)
    cache.allocate(salted, 4)
    assert [event.namespace for event in cache.take_events()] == [Namespace(salt="s"), None]
    adapted = request(range(8), lora=Lora("a", "/a"))
    admit(cache, adapted, 4)
    cache.allocate(adapted, 4)
    assert [event.namespace for event in cache.take_events()] == [Namespace("a"), Namespace("a")]


def test_on_the_wire_a_salt_is_named_twice(cache):
    """The second time in a field that vLLM does not send, and its decoder does not read."""
    admit(cache, request(range(4), salt="s"))
    _, [event], _ = msgspec.msgpack.decode(codec.encode(EventBatch(events=cache.take_events())))
    assert event["extra_keys"] == [["s"]]
    assert event["cache_salt"] == "s"


def test_tails_are_evicted_first_and_one_by_one(cache):
    first, second = request(range(16)), request(range(100, 120))
    admit(cache, first)
    cache.free(first)
    cache.take_events()
    admit(cache, second)  # 5 blocks, 4 are empty
    assert cache.take_events()[:1] == (BlockRemoved(block_hashes=ids(first, 3)),)
    assert len(cache.find_hits(request(range(17)))) == 3


def test_hits_that_are_free_are_counted_as_taken(cache):
    first = request(range(16))
    admit(cache, first)
    cache.free(first)
    longer = request(range(32))  # 8 blocks, all there are: 4 of them hits
    assert cache.allocate(longer, 16, cache.find_hits(longer))
    assert cache.num_free == 0


def test_a_request_of_which_the_rest_would_not_fit_is_rejected(cache):
    admit(cache, request(range(20)))
    late = request(range(100, 120))
    assert not cache.allocate(late, 4, whole_must_fit=True)
    assert cache.allocate(late, 4)


def test_two_requests_that_fill_the_same_block_keep_a_copy_each(cache):
    references = request(range(3)), request(range(3))
    for reference in references:
        admit(cache, reference)
    for reference in references:
        reference.append(7)
        assert cache.allocate(reference, 1)
    assert [event.block_hashes for event in cache.take_events()] == [ids(references[0], 0)] * 2
    assert len(cache.pool.cached_hashes()[references[0].block_hashes[0]]) == 2


def test_a_reset_is_rejected_while_a_request_has_blocks(cache):
    held = request(range(8))
    admit(cache, held)
    assert not cache.pool.reset()
    cache.free(held)
    assert cache.pool.reset()
    assert cache.take_events()[-1] == AllBlocksCleared()
    assert cache.find_hits(request(range(9))) == []
