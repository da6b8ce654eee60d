"""Requests that another than the router has placed: moved, and adopted from a peer."""

import pytest

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, UnknownRankError
from kvplug.hashing import BlockHasher, as_tokens
from kvplug.kernels import costing

PROMPT = list(range(64))
IN_LOAD = [
    costing.WAITING_MS,
    costing.NUM_WAITING,
    costing.NUM_RUNNING,
    costing.PREFILL_TOKENS,
    costing.CONTEXT_TOKENS,
    costing.ACTIVE_BLOCKS,
    costing.COMING_BLOCKS,
]


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(*workers, clock=None, **settings):
    router = Router(RouterConfig(block_size=4, **settings), clock=clock or Clock())
    for worker in workers:
        router.add_worker(worker)
    return router


def store(router, worker, tokens):
    names = tuple(range(1, len(tokens) // 4 + 1))
    event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=4)
    router.apply(Rank(worker), EventBatch(events=(event,)))


def load_of(router, worker):
    return router.load.ranks[router.fleet_index.numbers.number_of(Rank(worker)), IN_LOAD].tolist()


def routed_to(worker, *, stored=()):
    """What is counted for PROMPT where it was routed at once."""
    router = make_router("a", "b")
    for each in stored:
        store(router, each, PROMPT[:32])
    router.route(PROMPT, workers=[worker])
    return load_of(router, worker)


@pytest.mark.parametrize("stored", [(), ("a",), ("b",), ("a", "b")])
def test_a_booking_moves_with_what_the_other_rank_holds(stored):
    router = make_router("a", "b")
    for each in stored:
        store(router, each, PROMPT[:32])
    router.route(PROMPT, request_id="r", workers=["a"])
    assert router.moved("r", Rank("b")) is True
    assert load_of(router, "a") == [0.0] * len(IN_LOAD)
    assert load_of(router, "b") == routed_to("b", stored=stored)
    assert router.finish("r", 5) is True
    assert load_of(router, "b") == [0.0] * len(IN_LOAD)


def test_a_request_that_has_moved_is_expected_where_it_is():
    router = make_router("a", "b")
    router.route(PROMPT, request_id="r", workers=["a"])
    router.moved("r", Rank("b"))
    assert router.route(PROMPT, workers=["a"]).overlap_blocks == 0
    router = make_router("a", "b")
    router.route(PROMPT, request_id="r", workers=["a"])
    router.moved("r", Rank("b"))
    assert router.route(PROMPT, workers=["b"]).overlap_blocks == 16


def test_what_others_in_flight_bring_stays_expected():
    router = make_router("a", "b")
    router.route(PROMPT[:32], workers=["a"])
    router.route(PROMPT, request_id="r", workers=["a"])
    router.moved("r", Rank("b"))
    assert router.peek(PROMPT, workers=["a"]).overlap_blocks == 8


def test_a_move_is_no_further_request():
    router, same = make_router("a", "b"), make_router("a", "b")
    for each in (router, same):
        each.route(PROMPT, request_id="r", workers=["a"])
    router.moved("r", Rank("b"))
    (arrays,), (untouched,) = router._decider._arrays.values(), same._decider._arrays.values()
    assert arrays.traffic.tolist() == untouched.traffic.tolist()
    assert router.load.popular_counts.tolist() == same.load.popular_counts.tolist()


def test_times_of_a_request_that_has_moved_teach_nothing():
    clock = Clock()
    router = make_router("a", "b", clock=clock)
    router.route(PROMPT, request_id="r", workers=["a"])
    router.moved("r", Rank("b"))
    clock.now_s += 5.0
    assert router.first_token("r") is True
    clock.now_s += 5.0
    assert router.finish("r", 9) is True
    quality = router.model_quality(Rank("b"))
    assert (quality.num_first_tokens, quality.num_answers, quality.num_wholes) == (0, 0, 0)


def test_blocks_of_the_answer_move_along():
    router = make_router("a", "b")
    router.route(PROMPT, request_id="r", workers=["a"])
    router.route(PROMPT[:32], request_id="other", workers=["b"])
    router.add_output_block("r")
    router.add_output_block("r", 0.5)
    assert load_of(router, "a")[5] == 9  # 16 of the prompt and 2 of the answer, all at a half
    router.moved("r", Rank("b"))
    assert (load_of(router, "a")[5], load_of(router, "b")[5]) == (0, 8 + 4 + 1)
    router.finish("r")
    assert load_of(router, "b")[5] == 8


def test_a_move_to_where_it_is_changes_nothing():
    router = make_router("a", "b")
    router.route(PROMPT, request_id="r", workers=["a"])
    router.first_token("r")
    before = router.load.ranks.tolist()
    assert router.moved("r", Rank("a")) is True
    assert router.load.ranks.tolist() == before


def test_a_first_token_that_nobody_reports_is_presumed_on_the_other_rank():
    clock = Clock()
    router = make_router("a", "b", clock=clock)
    router.route(PROMPT, request_id="r", workers=["a"], reports_first_token=False)
    clock.now_s += 10.0
    router.moved("r", Rank("b"))
    assert load_of(router, "b")[1] == 1
    clock.now_s += 1.0
    router.peek(PROMPT)
    assert load_of(router, "b")[1:3] == [0, 1]


def test_a_move_between_block_sizes_shares_nothing_and_counts_all():
    router = make_router("a")
    router.add_worker("b", block_size=8)
    router.route(PROMPT, request_id="r", workers=["a"])
    router.moved("r", Rank("b"))
    assert load_of(router, "b")[2:6] == [1, 64, 64, 8]
    router.finish("r")
    assert load_of(router, "b") == [0.0] * len(IN_LOAD)


def test_moves_that_cannot_be_change_nothing():
    router = make_router("a")
    assert router.moved("r", Rank("a")) is False
    router.route(PROMPT, request_id="r")
    before = router.load.ranks.tolist()
    with pytest.raises(UnknownRankError, match="expected one that was added, known: a"):
        router.moved("r", Rank("z"))
    assert router.load.ranks.tolist() == before


HASHES = BlockHasher(4).sequence_hashes(as_tokens(PROMPT))


def test_an_adopted_request_is_load_as_one_of_ours():
    router = make_router("a", "b")
    store(router, "b", PROMPT[:32])
    router.adopt("r", Rank("b"), HASHES, len(PROMPT))
    assert load_of(router, "b") == routed_to("b", stored=["b"])
    assert router.peek(PROMPT, workers=["b"]).overlap_blocks == 16  # it will be there
    assert router.first_token("r") is True
    assert router.finish("r") is True
    assert load_of(router, "b") == [0.0] * len(IN_LOAD)
    assert router.model_quality(Rank("b")).num_first_tokens == 0


def test_a_peer_knows_better_what_is_to_be_computed():
    router = make_router("a")
    router.adopt("r", Rank("a"), HASHES, len(PROMPT), prefill_tokens=16)
    ms, waiting, running, tokens, context, active, coming = load_of(router, "a")
    assert (waiting, running, tokens, context, active, coming) == (1, 1, 16, 64, 16, 4)
    assert ms == pytest.approx(16 * 0.2)
    assert router.load.ranks[0, costing.FIRST_MS] == pytest.approx(16 * 0.2)
    router.finish("r")
    assert load_of(router, "a") == [0.0] * len(IN_LOAD)


def test_adoptions_that_cannot_be_change_nothing():
    router = make_router("a")
    router.route(PROMPT, request_id="r")
    before = router.load.ranks.tolist()
    with pytest.raises(ConfigError, match="cannot adopt request 'r': this id is in flight"):
        router.adopt("r", Rank("a"), HASHES, 64)
    with pytest.raises(UnknownRankError):
        router.adopt("s", Rank("b"), HASHES, 64)
    for num_tokens, prefill_tokens in [(-1, None), (64, 65), (64, -1), (64, 1.5), (15, None)]:
        with pytest.raises(ConfigError):
            router.adopt("s", Rank("a"), HASHES, num_tokens, prefill_tokens)
    assert router.load.ranks.tolist() == before
    assert len(router.load) == 1
