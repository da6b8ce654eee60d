import random
import threading

import pytest
from msgspec import structs

from kvplug import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
    Rank,
    Router,
    RouterConfig,
    codec,
)
from kvplug.errors import ConfigError, HashingError, NoWorkerError
from kvplug.hashing import BlockHasher, as_tokens
from kvplug.kernels import costing
from kvplug.records import read_payloads

PROMPT = list(range(64))


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(*workers, clock=None, **settings):
    config = RouterConfig(block_size=4, **settings)
    router = Router(config, clock=clock or Clock(), random_=random.Random(0))
    for worker in workers:
        router.add_worker(worker)
    return router


def store(router, worker, tokens, *, dp_rank=0, **more):
    names = tuple(range(1, len(tokens) // 4 + 1))
    event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=4, **more)
    return router.apply(Rank(worker, dp_rank), EventBatch(events=(event,)))


def test_a_request_goes_to_the_worker_that_holds_its_prefix():
    router = make_router("a", "b", "c")
    store(router, "b", PROMPT[:48])
    decision = router.route([*PROMPT, 1, 2])
    assert decision.rank == Rank("b")
    assert (decision.overlap_blocks, decision.cached_tokens, decision.prompt_blocks) == (12, 48, 16)


def test_load_outweighs_a_short_prefix():
    router = make_router("a", "b")
    store(router, "a", PROMPT[:8])
    for i in range(3):
        assert router.route([7 + i] * 64, workers=["a"]).rank == Rank("a")
    assert router.route(PROMPT).rank == Rank("b")


def test_blocks_of_live_requests_are_shared_not_added():
    router = make_router("a", cost="blocks", speculative_ttl_s=0.0)
    costs = [router.route(prompt).cost for prompt in (PROMPT, PROMPT, [*PROMPT[:32], *[1] * 32])]
    # 16, then 16 more, then 16 to prefill; 16 blocks to decode, then 16, then 8 more.
    assert costs == [16 + 16, 32 + 16, 48 + 24]


def test_a_routed_prefix_counts_as_cached_until_the_engine_says_so():
    clock = Clock()
    router = make_router("a", "b", clock=clock)
    first = router.route(PROMPT)
    router.finish(first.request_id)
    second = router.route(PROMPT)
    assert (second.rank, second.overlap_blocks) == (first.rank, 16)
    clock.now_s += 2.5
    assert router.route(PROMPT).overlap_blocks == 0


def test_what_is_overdue_is_dropped_as_requests_end():
    clock = Clock()
    router = make_router("a", clock=clock)
    first = router.route(PROMPT)
    clock.now_s += 2.5
    router.finish(first.request_id)
    assert len(router.index.speculative) == 0


def test_what_is_overdue_does_not_pile_up_when_no_request_ends():
    clock = Clock()
    router = make_router("a", clock=clock)
    for number in range(200):
        router.route([number] * 64)
        clock.now_s += 0.5  # so four are not overdue
    assert len(router.index.speculative) <= 16 * 16


def test_a_removal_within_the_speculative_time_is_not_undone():
    router = make_router("a")
    router.route(PROMPT[:8])
    store(router, "a", PROMPT[:8])
    removed = BlockRemoved(block_hashes=(2,))
    router.apply(Rank("a"), EventBatch(events=(removed,)))
    assert router.route(PROMPT[:8]).overlap_blocks == 1


def test_without_speculation_a_burst_misses():
    router = make_router("a", "b", speculative_ttl_s=0.0)
    assert [router.route(PROMPT).overlap_blocks for _ in range(3)] == [0, 0, 0]


def test_a_salt_hides_what_others_cached():
    router = make_router("a")
    store(router, "a", PROMPT, namespace=Namespace(salt="x"))
    assert router.route(PROMPT).overlap_blocks == 0
    assert router.route(PROMPT, namespace=Namespace(salt="x")).overlap_blocks == 16


def test_each_data_parallel_rank_is_chosen_by_itself():
    router = make_router()
    router.add_worker("a", dp_size=3)
    store(router, "a", PROMPT, dp_rank=2)
    assert router.route(PROMPT).rank == Rank("a", 2)


def test_a_batch_is_of_the_rank_that_it_names():
    router = make_router()
    router.add_worker("a", dp_size=2)
    batches = [
        EventBatch(events=(BlockStored(block_hashes=(n,), token_ids=(n,) * 4, block_size=4),),
                   dp_rank=1)
        for n in (1, 2)
    ]  # fmt: skip
    assert router.apply(Rank("a"), batches[0]).num_stored == 1
    records = read_payloads([codec.encode(batches[1])])
    assert router.apply_records(Rank("a"), records).num_stored == 1
    assert [router.index.num_resident(Rank("a", n)) for n in (0, 1)] == [0, 2]
    of_nobody = structs.replace(batches[0], dp_rank=7)
    assert router.apply(Rank("a"), of_nobody).rejected == {"unknown_rank": 1}


def test_round_robin_takes_turns_whatever_is_cached():
    router = make_router("a", "b", mode="round_robin")
    store(router, "b", PROMPT)
    assert [router.route(PROMPT).rank.worker for _ in range(4)] == ["a", "b", "a", "b"]


def test_temperature_spreads_requests():
    router = make_router("a", "b", temperature=5.0, speculative_ttl_s=0.0)
    store(router, "a", PROMPT)
    ranks = {router.route(PROMPT).rank.worker for _ in range(50)}
    assert ranks == {"a", "b"}


def test_weight_0_is_pure_load_balancing():
    router = make_router("a", "b", overlap_score_weight=0.0)
    router.route([9] * 64, workers=["a"])
    assert router.route(PROMPT).rank == Rank("b")


def test_a_request_is_load_until_it_is_finished():
    router = make_router("a")
    decision = router.route(PROMPT, request_id="r")
    assert len(router.load) == 1
    with pytest.raises(ConfigError, match="'r': this id is in flight already"):
        router.route(PROMPT, request_id="r")
    router.finish(decision.request_id)
    assert len(router.load) == 0


def test_of_a_request_that_is_not_in_flight_nothing_can_be_said():
    router = make_router("a", "b")
    router.route(PROMPT, request_id="r")
    said = (
        lambda: router.renew("r"),
        lambda: router.moved("r", Rank("b")),
        lambda: router.add_output_block("r"),
        lambda: router.first_token("r"),
        lambda: router.finish("r"),
    )
    assert [say() for say in said] == [True] * len(said)
    before = router.load.ranks.tolist()
    assert [say() for say in said] == [False] * len(said)
    assert router.load.ranks.tolist() == before


def test_a_second_first_token_has_no_effect():
    router = make_router("a")
    router.route(PROMPT, request_id="r")
    assert [router.first_token("r") for _ in range(2)] == [True, False]


def test_hashes_of_a_caller_are_its_own():
    router = make_router("a")
    hashes = BlockHasher(4).sequence_hashes(as_tokens(PROMPT))
    asked = hashes.copy()
    asked.flags.writeable = False
    decision = router.route_hashed(asked, 64)
    asked.flags.writeable = True
    asked[:] = 0
    router.finish(decision.request_id)
    assert router.load.ranks[0, costing.ACTIVE_BLOCKS] == len(router.load.active) == 0


def test_a_request_that_nobody_finishes_expires():
    clock = Clock()
    router = make_router("a", clock=clock, request_expiry_s=30.0)
    router.route(PROMPT)
    clock.now_s += 31
    router.route(PROMPT)
    assert (len(router.load), router.load.num_expired) == (1, 1)


def test_nobody_to_route_to_is_said_with_who_is_known():
    router = make_router("a")
    with pytest.raises(NoWorkerError, match="known workers: a"):
        router.route(PROMPT, workers=["b"])
    assert len(router.load) == 0


def test_bad_tokens_lose_nothing():
    router = make_router("a")
    with pytest.raises(HashingError):
        router.route([1, -2])
    assert len(router.load) == 0


NO_NUMBERS_OF_TOKENS = (-1, 1.5, float("nan"), True, "7", 10**400)


@pytest.mark.parametrize("max_tokens", NO_NUMBERS_OF_TOKENS)
def test_a_bad_limit_of_the_answer_loses_nothing(max_tokens):
    router = make_router("a")
    for ask in (router.route, router.route_many):
        prompt = [PROMPT] if ask == router.route_many else PROMPT
        with pytest.raises(ConfigError, match="expected max_tokens to be a whole number"):
            ask(prompt, max_tokens=max_tokens)
    assert len(router.load) == 0


def test_an_answer_may_have_any_limit():
    router = make_router("a")
    for limit in (0, 2**31, 10**30):
        router.finish(router.route(PROMPT, max_tokens=limit).request_id, 10_000_000)
    assert router.engine_model(Rank("a")).step_ms < 1e4


@pytest.mark.parametrize("num_tokens", [*NO_NUMBERS_OF_TOKENS, 10_000_001, 10**30])
def test_a_bad_length_of_the_answer_loses_nothing(num_tokens):
    router = make_router("a")
    router.route(PROMPT, request_id="r")
    with pytest.raises(ConfigError, match="cannot finish 'r': expected num_tokens to be a whole"):
        router.finish("r", num_tokens)
    router.finish("r", 0)


def test_a_removed_worker_leaves_nothing_and_may_return():
    router = make_router("a", "b")
    store(router, "a", PROMPT)
    router.route([5] * 64, workers=["a"])
    router.remove_worker("a")
    assert (len(router.index), len(router.load)) == (0, 0)
    assert router.route(PROMPT).rank == Rank("b")
    router.add_worker("a")
    assert router.route(PROMPT, workers=["a"]).overlap_blocks == 0


def test_events_and_requests_from_two_threads_do_not_collide():
    router = make_router("a", "b")

    def tell():
        for i in range(300):
            store(router, "a", [i % 7 + 1] * 8)
            router.clear(Rank("a"))

    teller = threading.Thread(target=tell)
    teller.start()
    for i in range(300):
        router.finish(router.route([i % 7 + 1] * 8).request_id)
    teller.join()
    router.index.check()
    assert len(router.load) == 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda router: router.add_worker("b", block_size=0),
            "worker 'b': block_size must be at least 1, got 0",
        ),
        (
            lambda router: router.set_confidence(Rank("a"), float("nan")),
            "confidence must be a number in [0, 1], got nan",
        ),
        (
            lambda router: router.set_confidence(Rank("a"), 1.5),
            "confidence must be a number in [0, 1], got 1.5",
        ),
        (
            lambda router: router.route([1, 2], workers="ab"),
            "workers must be a collection of names, got 'ab'",
        ),
    ],
)
def test_arguments_that_make_no_sense_get_one_sentence(call, sentence):
    router = Router()
    router.add_worker("a")
    with pytest.raises(ConfigError) as rejected:
        call(router)
    assert str(rejected.value) == sentence
