import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.router.load import ActiveLoad, ActiveRequest

NUM_RANKS = 3
# A sequence hash stands for a whole prefix: here the number with the digits of its blocks.
prompts = st.lists(st.integers(1, 3), max_size=6).map(
    lambda blocks: [int("".join(map(str, blocks[: i + 1]))) for i in range(len(blocks))]
)
requests = st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), prompts), max_size=10)


def u64(numbers):
    return np.array(numbers, dtype=np.uint64)


def start(load, request_id, rank, hashes, *, prefill_tokens=0, deadline_s=1.0):
    request = ActiveRequest(rank, u64(hashes), prefill_tokens, deadline_s)
    load.start(str(request_id), request)


def seen(load, asked=()):
    return [array.tolist() for array in load.of(u64(asked), NUM_RANKS)]


@given(requests, prompts, st.data())
def test_live_blocks_are_counted_once_per_rank(started, asked, data):
    load, live = ActiveLoad(60.0), {}
    for number, (rank, hashes) in enumerate(started):
        start(load, number, rank, hashes)
        live[number] = (rank, hashes)
    for number in data.draw(st.sets(st.sampled_from(sorted(live)))) if live else ():
        assert load.finish(str(number))
        del live[number]
    on = [{h for r, hashes in live.values() if r == rank for h in hashes} for rank in range(3)]
    _, active_blocks, active_depth = seen(load, asked)
    assert active_blocks == [len(blocks) for blocks in on]
    assert active_depth == [[*(h in blocks for h in asked), False].index(False) for blocks in on]


def test_prefill_tokens_go_with_the_first_token_or_the_end():
    load = ActiveLoad(60.0)
    start(load, "a", 1, [1, 2], prefill_tokens=100)
    start(load, "b", 1, [3], prefill_tokens=50)
    assert seen(load)[0] == [0, 150, 0]
    load.first_token("a")
    load.first_token("a")
    load.first_token("nobody")
    assert seen(load)[0] == [0, 50, 0]
    load.finish("b")
    assert seen(load) == [[0, 0, 0], [0, 2, 0], [0, 0, 0]]


def test_lost_requests_expire():
    load = ActiveLoad(60.0)
    start(load, "a", 0, [1], prefill_tokens=5, deadline_s=10.0)
    start(load, "b", 0, [2], deadline_s=20.0)
    load.expire(9.0)
    assert len(load) == 2
    load.expire(10.0)
    assert ("a" in load, "b" in load, load.num_expired) == (False, True, 1)
    assert seen(load)[:2] == [[0, 0, 0], [1, 0, 0]]
    assert not load.finish("a")


def test_a_rank_that_goes_takes_its_load_along():
    load = ActiveLoad(60.0)
    start(load, "a", 0, [1], prefill_tokens=5)
    start(load, "b", 2, [1, 2])
    load.forget(0)
    assert seen(load)[:2] == [[0, 0, 0], [0, 0, 2]]
