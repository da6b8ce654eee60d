import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import costing
from kvplug.kernels.candidates import keep_idle, least_loaded

rows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 4, 8])),
    min_size=1,
    max_size=8,
)
COLUMNS = [
    costing.NUM_RUNNING, costing.PREFILL_TOKENS, costing.ACTIVE_BLOCKS, costing.CAPACITY_BLOCKS,
]  # fmt: skip


def ranks_of(rows):
    ranks = np.zeros((len(rows), costing.NUM_COLUMNS))
    ranks[:, COLUMNS] = rows
    return ranks.reshape(-1)


def chosen_of(rows, draw):
    return np.array([n for n in range(len(rows)) if draw & (1 << n)] or [0], dtype=np.int64)


@given(rows, st.integers(0, 255), st.sampled_from([0.0, 4.0, np.inf]), st.sampled_from([0.5, 2.0]))
def test_busy_ranks_are_left_out(rows, draw, most_tokens, most_share):
    candidates = chosen_of(rows, draw)
    out = np.zeros_like(candidates)
    num_kept = keep_idle(candidates, ranks_of(rows), most_tokens, most_share, out)
    assert out[:num_kept].tolist() == [
        number
        for number in candidates.tolist()
        for _, tokens, active, capacity in [rows[number]]
        if tokens <= most_tokens and (capacity == 0 or active <= most_share * capacity)
    ]


@given(rows, st.integers(0, 255), st.integers(0, 2**64 - 1))
def test_one_of_the_least_loaded_is_picked_each_for_its_share_of_the_draws(rows, draw, random):
    candidates = chosen_of(rows, draw)
    running = {number: rows[number][0] for number in candidates.tolist()}
    least = [number for number, count in running.items() if count == min(running.values())]
    picked = least_loaded(candidates, ranks_of(rows), np.uint64(random))
    assert picked == least[random % len(least)]
