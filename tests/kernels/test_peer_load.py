"""The load of several processes against sums in plain numpy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import costing, peer_load
from kvplug.kernels.peer_load import (
    CAPACITY,
    CONFIDENCE,
    FACT_WIDTH,
    NUM_BUSY,
    RESIDENT,
    ROW_WIDTH,
)

NUM_PROCESSES, NUM_SLOTS, NUM_RANKS = 3, 6, 4
FIRST = [costing.FIRST_MS, costing.FIRST_SINCE_MS]
SUMMED = [column for column in range(NUM_BUSY) if column not in FIRST]
WAITING = [costing.WAITING_MS, costing.PREFILL_TOKENS, costing.COMING_BLOCKS]

counts = st.integers(0, 9)
slots = st.permutations(range(-1, NUM_SLOTS)).map(lambda each: each[:NUM_RANKS])
loads = st.lists(counts, min_size=NUM_BUSY, max_size=NUM_BUSY)
shown = st.lists(loads, min_size=NUM_PROCESSES * NUM_SLOTS, max_size=NUM_PROCESSES * NUM_SLOTS)
of_ranks = st.lists(loads, min_size=NUM_RANKS, max_size=NUM_RANKS)


def rows_of(given_rows):
    rows = np.zeros((NUM_PROCESSES, NUM_SLOTS, ROW_WIDTH))
    rows[:, :, :NUM_BUSY] = np.array(given_rows).reshape(NUM_PROCESSES, NUM_SLOTS, NUM_BUSY)
    return rows


def reference_sums(rows, own, slot):
    """What the others have there, and of which of them the oldest request is."""
    others = [rows[process, slot, :NUM_BUSY] for process in range(NUM_PROCESSES) if process != own]
    sums = np.sum(others, axis=0)
    waiting = [row for row in others if row[costing.FIRST_MS] > 0]
    oldest = min(waiting, key=lambda row: row[costing.FIRST_SINCE_MS], default=np.zeros(NUM_BUSY))
    sums[FIRST] = oldest[FIRST]
    sums[costing.FIRST_MS] = min(sums[costing.FIRST_MS], sums[costing.WAITING_MS])
    return sums


@given(shown, slots, of_ranks, of_ranks, st.integers(0, NUM_PROCESSES - 1))
def test_what_the_others_have_counts_beside_ones_own(given_rows, slots, mine, before, own):
    rows, ranks = rows_of(given_rows), np.zeros((NUM_RANKS, costing.NUM_COLUMNS))
    peers, own_load = np.array(before, dtype=np.float64), np.array(mine, dtype=np.float64)
    ranks[:, :NUM_BUSY] = own_load + peers
    ranks[:, FIRST] = own_load[:, FIRST]
    expected, changed = ranks[:, :NUM_BUSY].copy(), 0
    for rank, slot in enumerate(slots):
        sums = reference_sums(rows, own, slot) if slot >= 0 else peers[rank].copy()
        if (sums != peers[rank]).any():
            changed += 1
            expected[rank, SUMMED] = own_load[rank, SUMMED] + sums[SUMMED]
            is_idle, since = not own_load[rank, costing.NUM_WAITING], costing.FIRST_SINCE_MS
            if is_idle:
                expected[rank, WAITING] = sums[WAITING]
            if is_idle or own_load[rank, since] == before[rank][since]:
                expected[rank, FIRST] = sums[FIRST]
    num_changed = peer_load.take(
        rows.reshape(-1), own, NUM_PROCESSES, np.array(slots), ranks.reshape(-1),
        peers.reshape(-1), np.zeros(NUM_BUSY),
    )  # fmt: skip
    assert num_changed == changed
    np.testing.assert_array_equal(ranks[:, :NUM_BUSY], expected)
    for rank, slot in enumerate(slots):
        if slot >= 0:
            np.testing.assert_array_equal(peers[rank], reference_sums(rows, own, slot))


@given(slots, of_ranks, of_ranks)
def test_what_is_shown_is_ones_own(slots, mine, others):
    ranks, peers = np.zeros((NUM_RANKS, costing.NUM_COLUMNS)), np.array(others, dtype=np.float64)
    ranks[:, :NUM_BUSY] = np.array(mine) + peers
    ranks[:, FIRST] = np.array(mine, dtype=np.float64)[:, FIRST]
    out, expected = np.zeros(NUM_SLOTS * ROW_WIDTH), np.zeros((NUM_SLOTS, ROW_WIDTH))
    for rank, slot in enumerate(slots):
        if slot >= 0:
            expected[slot, :NUM_BUSY] = mine[rank]
            is_theirs = mine[rank][costing.FIRST_SINCE_MS] == others[rank][costing.FIRST_SINCE_MS]
            if is_theirs or not mine[rank][costing.NUM_WAITING]:
                expected[slot, FIRST] = 0.0
    arguments = np.array(slots), ranks.reshape(-1), peers.reshape(-1), out
    assert peer_load.show(*arguments) == np.count_nonzero(expected)
    np.testing.assert_array_equal(out.reshape(NUM_SLOTS, ROW_WIDTH), expected)
    assert peer_load.show(*arguments) == 0


@given(
    st.lists(st.tuples(counts, counts, counts), min_size=NUM_RANKS, max_size=NUM_RANKS),
    st.permutations(range(-1, NUM_RANKS)).map(lambda each: each[:NUM_RANKS]),
    st.lists(counts, min_size=NUM_RANKS, max_size=NUM_RANKS),
)
def test_facts_of_the_writer_are_taken_over(facts, numbers, confidence):
    ranks = np.zeros((NUM_RANKS, costing.NUM_COLUMNS))
    expected = ranks.copy()
    for fact, number in zip(facts, numbers, strict=True):
        if number >= 0:
            expected[number, costing.RESIDENT_BLOCKS] = fact[RESIDENT]
            expected[number, costing.CAPACITY_BLOCKS] = fact[CAPACITY]
    has_capacity = expected[:, costing.CAPACITY_BLOCKS].any()
    has_confidence = [fact[CONFIDENCE] for fact in facts] != confidence
    assert FACT_WIDTH == 3
    changed = peer_load.take_facts(
        np.array(facts, dtype=np.float64).reshape(-1), np.array(numbers), ranks.reshape(-1),
        np.array(confidence, dtype=np.float64),
    )  # fmt: skip
    assert changed == int(has_capacity) + 2 * int(has_confidence)
    np.testing.assert_array_equal(ranks, expected)
