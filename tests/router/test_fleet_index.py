"""Two models, two block sizes, workers that say late what they are: one Router for all of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Namespace, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, NoWorkerError
from kvplug.events import CxlState, CxlStateTransition
from kvplug.hashing import as_tokens
from kvplug.kernels import costing
from kvplug.router.fleet_index import FleetIndex
from tests.index.reference import engine_hash

PROMPT = list(range(64))


def make_router(**settings):
    config = RouterConfig(speculative_ttl_s=0.0, **settings)
    return Router(config, clock=lambda: 1000.0, random_=random.Random(0))


def stored(tokens, block_size, *, namespace=None, algorithm="common"):
    ends = range(block_size, len(tokens) + 1, block_size)
    names = tuple(engine_hash(algorithm, (namespace, tokens[:end])) for end in ends)
    ids = tuple(tokens[: len(names) * block_size])
    return BlockStored(
        block_hashes=names, token_ids=ids, block_size=block_size, namespace=namespace
    )


def store(router, worker, tokens, block_size, **more):
    event = stored(tokens, block_size, **more)
    return router.apply(Rank(worker), EventBatch(events=(event,)))


def cached(router, worker, tokens=PROMPT, **more):
    """Tokens of the prompt that the router expects in the worker's cache."""
    decision = router.route(tokens, workers=[worker], **more)
    router.finish(decision.request_id)
    return decision.cached_tokens


def sizes(router):
    return sorted(group.block_size for group in router.fleet_index.groups)


def check(router):
    for group in router.fleet_index.groups:
        group.index.check()


def test_a_prompt_that_tables_grow_for_is_decided_by_what_is_cached():
    """In a mixed fleet, room that was made after scoring once took the scores with it."""
    router = make_router(cost="blocks")
    router.add_worker("fine", block_size=4), router.add_worker("coarse", block_size=16)
    for length in (64, 1024, 4096):
        prompt = list(range(length, 2 * length))
        store(router, "coarse", prompt, 16)
        decision = router.route(prompt)
        assert (decision.rank, decision.cached_tokens) == (Rank("coarse"), length)
        assert decision.cost < length


def test_block_sizes_are_learnt_and_compared_in_tokens():
    router = make_router(cost="blocks")
    router.add_worker("fine"), router.add_worker("coarse")
    assert router.fleet_index.block_size_of("fine") is None
    assert store(router, "fine", PROMPT[:24], 4).num_stored == 6
    assert store(router, "coarse", PROMPT[:48], 16).num_stored == 3
    assert sizes(router) == [4, 16]
    assert [router.fleet_index.block_size_of(w) for w in ("fine", "coarse")] == [4, 16]
    decision = router.route(PROMPT)
    assert (decision.rank, decision.cached_tokens) == (Rank("coarse"), 48)
    assert (decision.block_size, decision.overlap_blocks, decision.prompt_blocks) == (16, 3, 4)
    assert decision.cost == (64 - 48) / 16 + 4
    assert (cached(router, "fine"), cached(router, "coarse")) == (24, 48)
    check(router)


def test_load_of_different_block_sizes_is_compared_in_tokens():
    router = make_router(cost="blocks")
    router.add_worker("fine", block_size=4), router.add_worker("coarse", block_size=16)
    # 64 tokens of other work on each: 16 blocks here, 4 blocks there.
    for worker in ("fine", "coarse"):
        router.first_token(router.route([7] * 64, workers=[worker]).request_id)
    busy = {w: router.route(PROMPT, workers=[w]) for w in ("fine", "coarse")}
    assert [busy[w].cost * busy[w].block_size for w in ("fine", "coarse")] == [192, 192]
    for decision in busy.values():
        router.finish(decision.request_id)
    router.route([9] * 16, workers=["coarse"])
    assert router.route(PROMPT).rank == Rank("fine")


def test_costs_in_ms_of_different_block_sizes_are_compared_as_they_are():
    router = make_router()
    router.add_worker("fine"), router.add_worker("coarse")
    store(router, "fine", PROMPT[:24], 4), store(router, "coarse", PROMPT[:48], 16)
    assert router.route(PROMPT).rank == Rank("coarse")
    for _ in range(3):
        router.route([9] * 640, workers=["coarse"])
    assert router.route(PROMPT).rank == Rank("fine")


def test_a_size_that_was_said_is_kept_and_another_one_is_rejected_by_name():
    router = make_router()
    router.add_worker("a", block_size=4)
    assert store(router, "a", PROMPT, 16).rejected == {"block_size": 4}
    router = make_router(block_size=4)
    router.add_worker("a"), router.add_worker("b", block_size=16)
    assert store(router, "a", PROMPT, 16).rejected == {"block_size": 4}
    assert store(router, "b", PROMPT, 16).num_stored == 4


def test_a_size_that_was_learnt_holds_until_the_worker_is_cleared():
    router = make_router()
    router.add_worker("a")
    store(router, "a", PROMPT, 8)
    assert store(router, "a", PROMPT, 16).rejected == {"block_size": 4}
    router.clear(Rank("a"))  # it restarted, with another --block-size
    assert store(router, "a", PROMPT, 16).num_stored == 4
    assert (sizes(router), cached(router, "a")) == ([16], 64)


def test_workers_that_said_nothing_yet_go_along_with_the_first_that_does():
    router = make_router()
    for worker in "abc":
        router.add_worker(worker)
    store(router, "b", PROMPT, 32)
    assert (sizes(router), router.index.block_size) == ([32], 32)
    store(router, "c", PROMPT, 32)
    assert router.fleet_index.only.fleet_numbers is None  # the fast path: equal numbers


def test_requests_in_flight_survive_the_change_of_index():
    router = make_router()
    router.add_worker("a", dp_size=2)
    decisions = [router.route(PROMPT) for _ in range(3)]
    store(router, "a", PROMPT, 32)
    for decision in decisions:
        router.first_token(decision.request_id)
        router.finish(decision.request_id)
    assert router.load.ranks[:, costing.ACTIVE_BLOCKS].tolist() == [0, 0]
    assert len(router.load.active) == 0


def test_each_model_has_an_index_and_the_same_engine_hashes_do_no_harm():
    # tiny-llama and tiny-gemma: the model is not in vLLM's hashes.
    router = make_router(block_size=16)
    router.add_worker("llama", model="llama"), router.add_worker("gemma", model="gemma")
    store(router, "llama", PROMPT, 16)
    assert (cached(router, "llama"), cached(router, "gemma")) == (64, 0)
    store(router, "gemma", PROMPT[:32], 16)
    assert (cached(router, "llama"), cached(router, "gemma")) == (64, 32)
    assert router.route([5] * 16, model="gemma").rank == Rank("gemma")
    assert len(router.index_of(Rank("gemma"))) == 2
    with pytest.raises(ConfigError, match="several indexes"):
        _ = router.index
    with pytest.raises(NoWorkerError, match="expected one that serves model 'mistral'; known"):
        router.route(PROMPT, model="mistral")
    check(router)


def test_a_model_may_become_known_after_the_first_events():
    router = make_router()
    router.add_worker("a"), router.add_worker("b")
    store(router, "a", PROMPT, 16), store(router, "b", PROMPT[:16], 16)
    router.add_worker("a", model="m"), router.add_worker("b", model="n")
    assert (cached(router, "a"), cached(router, "b")) == (64, 16)  # nothing was lost
    assert len(router.fleet_index.groups) == 1
    assert router.route(PROMPT, model="n").rank == Rank("b")
    router.clear(Rank("b"))
    assert {group.model for group in router.fleet_index.groups} == {"m", "n"}
    assert cached(router, "a") == 64


def test_a_worker_without_a_model_takes_any():
    router = make_router()
    router.add_worker("a")
    assert router.route(PROMPT, model="whatever").rank == Rank("a")


def test_a_worker_that_leaves_takes_its_index_along():
    router = make_router()
    router.add_worker("a", model="m", block_size=4)
    router.add_worker("b", model="n", block_size=8, dp_size=2)
    store(router, "b", PROMPT, 8)
    router.route([3] * 16, workers=["b"])
    router.remove_worker("b")
    assert (sizes(router), len(router.load), router.ranks) == ([4], 0, [Rank("a")])
    assert store(router, "b", PROMPT, 8).rejected == {"unknown_rank": 1}
    router.remove_worker("a")
    router.add_worker("c", model="n", block_size=8)
    assert (sizes(router), cached(router, "c")) == ([8], 0)


def test_another_configured_size_forgets_what_was_held_with_the_former():
    router = make_router()
    router.add_worker("a", block_size=4)
    store(router, "a", PROMPT, 4)
    router.add_worker("a", block_size=16)
    assert (sizes(router), cached(router, "a")) == ([16], 0)


def test_engines_that_hash_otherwise_share_an_index_in_a_hash_space_of_their_own():
    router = make_router()
    router.add_worker("a"), router.add_worker("b")
    store(router, "a", PROMPT, 16, algorithm="PYTHONHASHSEED=0")
    store(router, "b", PROMPT[:32], 16, algorithm="PYTHONHASHSEED=1")
    assert (len(router.index.hash_spaces), len(router.index)) == (2, 4)
    assert (cached(router, "a"), cached(router, "b")) == (64, 32)


NAMESPACES = [
    Namespace(),
    Namespace(salt="s"),
    Namespace(lora_name="s"),
    Namespace(lora_name="l", salt="s"),
    Namespace(lora_name="s", salt="l"),
]
WORKERS = {"a": ("m", 2), "b": ("m", 4), "c": ("n", 4), "d": ("n", 2)}
prompts = st.lists(st.sampled_from([1, 2]), min_size=4, max_size=12)
namespaces = st.sampled_from(NAMESPACES)


@given(
    stores=st.lists(st.tuples(st.sampled_from("abcd"), prompts, namespaces), max_size=8),
    asked=prompts,
    namespace=namespaces,
    names_models=st.booleans(),
)
def test_a_mixed_fleet_equals_its_plain_reference(stores, asked, namespace, names_models):
    router = make_router()
    held = {worker: set() for worker in WORKERS}
    for worker, (model, _) in WORKERS.items():
        router.add_worker(worker, model=model if names_models else "")
    for worker, tokens, of in stores:
        size = WORKERS[worker][1]
        assert not store(router, worker, tuple(tokens), size, namespace=of).rejected
        held[worker] |= {(of, tuple(tokens[:n])) for n in range(size, len(tokens) + 1, size)}
    check(router)
    for worker, (_, size) in WORKERS.items():
        ends = range(size, len(asked) + 1, size) if held[worker] else ()
        there = [(namespace, tuple(asked[:end])) in held[worker] for end in ends]
        depth = [*there, False].index(False)
        assert cached(router, worker, asked, namespace=namespace) == depth * size


def test_what_a_rank_is_confidence_moves_with_it_to_another_index():
    index = FleetIndex(None, speculative_ttl_s=0.0)
    for worker in ("a", "b"):
        index.add_worker(worker, 1, "", None)
    index.set_confidence(Rank("b"), 0.25)
    index.set_confidence(Rank("stranger"), 0.25)
    index.add_worker("a", 1, "one", 4)
    index.add_worker("b", 1, "two", 8)
    group = index.group_of(Rank("b"))
    event = BlockStored(block_hashes=(1,), token_ids=tuple(range(8)), block_size=8)
    index.apply(Rank("b"), EventBatch(events=(event,)))
    hashes = group.index.hasher.sequence_hashes(as_tokens(range(8)))
    overlap = group.index.overlap(hashes, 0.0)
    at = group.index_ranks(2)[index.numbers.number_of(Rank("b"))]
    assert (overlap.depth[at], overlap.credit[at]) == (1, 0.25)


def test_blocks_that_moved_to_a_worker_are_its_own():
    router = make_router(block_size=4)
    router.add_worker("prefill"), router.add_worker("decode")
    names = stored(PROMPT[:16], 4).block_hashes
    store(router, "prefill", PROMPT[:16], 4)
    moved = CxlStateTransition(
        block_hashes=names, new_state=CxlState.CXL_POOLED, pool_id=0, accessible_workers=("decode",)
    )
    router.apply(Rank("prefill"), EventBatch(events=(moved,)))
    assert (cached(router, "prefill"), cached(router, "decode")) == (16, 16)
    loaded = CxlStateTransition(block_hashes=names[:2], new_state=CxlState.LOCAL_GPU)
    assert router.apply(Rank("decode"), EventBatch(events=(loaded,))).num_moved == 2
    router.remove_worker("prefill")
    assert cached(router, "decode") == 8
    check(router)


def by_pairs(tokens, block_size):
    """What SGLang with EAGLE stores of a prompt: a block depends on the token after it."""
    num_blocks = (len(tokens) - 1) // block_size
    ends = [(number + 1) * block_size + 1 for number in range(num_blocks)]
    return BlockStored(
        block_hashes=tuple(engine_hash("eagle", tuple(tokens[:end])) for end in ends),
        token_ids=tuple(tokens[: num_blocks * block_size + 1]),
        block_size=block_size,
        bigrams=True,
    )


@pytest.mark.parametrize("block_size", [None, 16])
def test_engines_that_key_blocks_by_pairs_are_matched_by_pairs(block_size):
    router = make_router(block_size=block_size)
    for worker in ("eagle", "plain"):
        router.add_worker(worker)
    router.apply(Rank("eagle"), EventBatch(events=(by_pairs(PROMPT, 16),)))
    store(router, "plain", PROMPT, 16)
    assert (cached(router, "eagle"), cached(router, "plain")) == (48, 64)
    # Where prompts part at the start of a block, the block before is another one for EAGLE.
    other = PROMPT[:32] + [999] * 32
    assert (cached(router, "eagle", other), cached(router, "plain", other)) == (16, 32)
    applied = store(router, "eagle", PROMPT, 16)
    assert list(applied.rejected) == ["bigram_tokens"]
    assert len(router.fleet_index.groups) == 2
    check(router)
    router.clear(Rank("eagle"))
    store(router, "eagle", PROMPT, 16)
    assert cached(router, "eagle") == 64
    assert len(router.fleet_index.groups) == 1
