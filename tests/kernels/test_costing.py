import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import costing
from tests.kernels import twins

NUM_RANKS = 4
RANK_OF_HOLDER = [h % NUM_RANKS for h in range(70)]
CREDIT_OF_HOLDER = [(1.0, 0.75, 0.25, 0.0)[h // NUM_RANKS % 4] for h in range(70)]
holder_sets = st.frozensets(st.integers(0, 7) | st.sampled_from([63, 64, 69]), max_size=4)


def overlap(holders_of_block):
    runs = twins.segments(holders_of_block)
    ends = np.array([end for end, _ in runs], dtype=np.int64)
    bits = np.zeros((len(runs) + 1) * 2, dtype=np.uint64)
    for s, (_, holders) in enumerate(runs):
        for h in holders:
            bits[2 * s + h // 64] |= np.uint64(1 << (h % 64))
    depth, credit = np.zeros(NUM_RANKS, dtype=np.int64), np.zeros(NUM_RANKS)
    ranks = np.array(RANK_OF_HOLDER + [0] * 58, dtype=np.int32)
    credits = np.array(CREDIT_OF_HOLDER + [0.0] * 58)
    sets = np.arange(len(runs), dtype=np.int64)
    costing.overlap(ends, sets, bits, 2, ranks, credits, depth, credit)
    return depth.tolist(), credit.tolist()


@given(st.lists(st.tuples(holder_sets, st.integers(1, 5)), max_size=8))
def test_overlap_is_the_contiguous_prefix_of_each_rank(runs):
    holders_of_block = [holders for holders, length in runs for _ in range(length)]
    depth, credit = overlap(holders_of_block)
    twin = twins.overlap(holders_of_block, RANK_OF_HOLDER, CREDIT_OF_HOLDER)
    assert depth == [twin[rank][0] for rank in range(NUM_RANKS)]
    np.testing.assert_allclose(credit, [twin[rank][1] for rank in range(NUM_RANKS)])


loads = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(0, 50), st.integers(0, 10)),
    max_size=6,
)


@given(st.floats(0, 50), st.integers(0, 50), st.floats(0, 4), loads)
def test_cost_is_the_formula(prompt_blocks, num_full_blocks, weight, ranks):
    credit, prefill, active, active_depth = (
        (list(c) for c in zip(*ranks, strict=True)) if ranks else ([], [], [], [])
    )
    out = np.empty(len(ranks))
    costing.cost(
        prompt_blocks, num_full_blocks, weight, np.array(credit, dtype=float),
        np.array(prefill, dtype=float), np.array(active, dtype=np.int64),
        np.array(active_depth, dtype=np.int64), out,
    )  # fmt: skip
    expected = twins.cost(
        prompt_blocks, num_full_blocks, weight, credit, prefill, active, active_depth
    )
    np.testing.assert_allclose(out, expected)


def test_the_worked_example_of_the_specification():
    # Three workers with 8, 5, 2 blocks to prefill and 10, 5, 9 to decode: the second one wins.
    out = np.empty(3)
    credit = np.array([2.0, 5.0, 8.0])
    zeros = np.zeros(3, dtype=np.int64)
    costing.cost(10.0, 0, 1.0, credit, np.zeros(3), np.array([10, 5, 9]), zeros, out)
    assert out.tolist() == [18.0, 10.0, 11.0]
