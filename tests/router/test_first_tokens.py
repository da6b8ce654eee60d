"""First tokens that nobody reports: by event, or presumed."""

import pytest

from kvplug import BlockRemoved, BlockStored, EventBatch, Rank, Router, RouterConfig, codec, packed
from kvplug.hashing import BlockHasher, as_tokens
from kvplug.kernels import costing
from kvplug.records import read_payloads

PROMPT = list(range(100))  # six full blocks of 16: 22 ms


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def apply_events(router, batch):
    router.apply(Rank("a"), batch)


def apply_records(router, batch):
    router.apply_records(Rank("a"), read_payloads([codec.encode(batch)]))


def apply_packed(router, batch):
    events = []
    for event in batch.events:
        assert event.parent is None
        hashes = BlockHasher(16).sequence_hashes(as_tokens(event.token_ids))
        events.append(packed.PackedStored(hashes=hashes, engine_hashes=event.block_hashes))
    router.apply_packed(Rank("a"), packed.encode(events))


WAYS = [apply_events, apply_records, apply_packed]


def stored(tokens, *, first=1):
    num_blocks = len(tokens) // 16
    names = tuple(range(first, first + num_blocks))
    tokens = tuple(tokens[: 16 * num_blocks])
    return EventBatch(events=(BlockStored(block_hashes=names, token_ids=tokens, block_size=16),))


def make_router(clock, **settings):
    router = Router(RouterConfig(block_size=16, **settings), clock=clock)
    router.add_worker("a")
    return router


def num_waiting(router):
    return router.load.ranks[0, costing.NUM_WAITING]


@pytest.mark.parametrize("apply", WAYS)
def test_the_last_full_block_of_a_prompt_ends_its_prefill(apply):
    router = make_router(Clock())
    router.route(PROMPT, reports_first_token=False)
    apply(router, stored(PROMPT[:80]))
    assert num_waiting(router) == 1
    apply(router, stored(PROMPT))
    assert num_waiting(router) == router.load.ranks[0, costing.WAITING_MS] == 0
    assert router.load.ranks[0, costing.NUM_RUNNING] == 1


def test_who_reports_first_tokens_is_waited_for():
    router = make_router(Clock())
    router.route(PROMPT)
    apply_events(router, stored(PROMPT))
    assert num_waiting(router) == 1


def test_an_event_of_another_rank_ends_nothing():
    router = make_router(Clock())
    router.add_worker("b")
    router.route(PROMPT, workers=["b"], reports_first_token=False)
    apply_events(router, stored(PROMPT))
    assert router.load.ranks[1, costing.NUM_WAITING] == 1


def test_a_block_that_was_there_already_says_nothing():
    clock = Clock()
    router = make_router(clock)
    apply_events(router, stored(PROMPT))
    router.route(PROMPT, reports_first_token=False)
    apply_events(router, stored([7] * 16, first=100))
    assert num_waiting(router) == 1
    clock.now_s += 0.0031  # 2 ms, and 4 tokens of 0.2 ms
    router.peek([1])
    assert num_waiting(router) == 0


def test_an_event_that_is_due_is_waited_for_twice_as_long_as_predicted():
    clock = Clock()
    router = make_router(clock)
    apply_events(router, stored([7] * 16, first=100))
    router.route(PROMPT, reports_first_token=False)
    clock.now_s += 0.043
    router.peek([1])
    assert num_waiting(router) == 1
    clock.now_s += 0.002
    router.peek([1])
    assert num_waiting(router) == 0
    apply_events(router, stored(PROMPT))  # comes too late to matter
    assert num_waiting(router) == 0


def test_a_rank_without_events_is_not_waited_for():
    clock = Clock()
    router = make_router(clock)
    apply_events(router, stored([7] * 16, first=100))
    router.set_confidence(Rank("a"), 0.0)
    router.route(PROMPT, reports_first_token=False)
    clock.now_s += 0.0221
    router.peek([1])
    assert num_waiting(router) == 0


def test_a_prompt_without_a_full_block_is_presumed():
    clock = Clock()
    router = make_router(clock)
    router.route([1] * 10, reports_first_token=False)
    apply_events(router, stored(PROMPT))
    assert num_waiting(router) == 1
    clock.now_s += 0.01
    router.peek([1])
    assert num_waiting(router) == 0


def test_an_event_teaches_no_speed():
    clock = Clock()
    router = make_router(clock)
    router.route(PROMPT, request_id="r", reports_first_token=False)
    clock.now_s += 5.0
    apply_events(router, stored(PROMPT))
    assert router.model_quality(Rank("a")).num_first_tokens == 0
    clock.now_s += 5.0
    router.finish("r", 10)
    quality = router.model_quality(Rank("a"))
    assert (quality.num_answers, quality.num_wholes) == (0, 1)


def test_requests_that_are_over_are_not_looked_for():
    router = make_router(Clock())
    for number in range(5):
        router.finish(router.route([number] * 32, reports_first_token=False).request_id)
    apply_events(router, stored(PROMPT))
    router.route(PROMPT, reports_first_token=False)
    apply_events(router, EventBatch(events=(BlockRemoved(block_hashes=(6,)),)))
    assert num_waiting(router) == 1
    apply_events(router, stored(PROMPT))
    assert num_waiting(router) == 1  # it was there when the request came
