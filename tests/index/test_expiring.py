"""Blocks that count for a while: growth, bounds, and what the machine does not say."""

import numpy as np
import pytest

from kvplug.errors import IndexCorruptError
from kvplug.index.arrays import ArrayVersion
from kvplug.index.expiring import ExpiringBlocks, mark_of

TTL_S, CAPACITY, NUM_RANKS = 2.0, 16, 3


def u64(numbers):
    return np.array(numbers, dtype=np.uint64)


def depths(blocks, asked, now_s):
    return blocks.extend(u64(asked), np.zeros(NUM_RANKS, dtype=np.int64), now_s).tolist()


def test_an_entry_counts_until_its_time_is_up_though_nobody_expires_it():
    blocks = ExpiringBlocks(TTL_S)
    blocks.insert(1, u64([5, 6]), 0.0)
    assert depths(blocks, [5, 6, 7], 1.9) == [0, 2, 0]
    assert depths(blocks, [5, 6, 7], 2.0) == [0, 0, 0]
    assert len(blocks) == 2


def test_inserting_again_moves_the_deadline():
    blocks = ExpiringBlocks(TTL_S)
    blocks.insert(0, u64([5, 6]), 0.0)
    blocks.insert(0, u64([5]), 1.5)
    assert depths(blocks, [5, 6], 2.5) == [1, 0, 0]
    blocks.expire(2.5)
    assert len(blocks) == 1


def test_a_time_to_live_of_0_turns_it_off():
    blocks = ExpiringBlocks(0.0)
    blocks.insert(0, u64([1, 2]), 0.0)
    assert depths(blocks, [1, 2], 0.0) == [0, 0, 0]


def test_a_clock_that_goes_back_shortens_no_life():
    blocks = ExpiringBlocks(TTL_S)
    blocks.insert(0, u64([1]), 100.0)
    blocks.insert(1, u64([1]), 90.0)
    assert depths(blocks, [1], 101.0) == [1, 1, 0]
    blocks.check()


def test_an_ended_entry_takes_no_younger_one_of_its_block_along():
    blocks = ExpiringBlocks(TTL_S)
    blocks.insert(0, u64([5]), 0.0)
    blocks.confirm(0, u64([5]))
    blocks.insert(0, u64([5]), 1.0)
    blocks.expire(2.5)
    assert depths(blocks, [5], 2.5) == [1, 0, 0]


def test_what_does_not_fit_is_counted():
    blocks = ExpiringBlocks(TTL_S, CAPACITY)
    blocks.insert(0, u64(range(1, CAPACITY + 5)), 0.0)
    blocks.insert(0, u64([100]), 0.0)
    assert (len(blocks), blocks.num_lost) == (CAPACITY, 5)


def test_the_end_of_a_prompt_makes_room_before_its_beginning():
    blocks = ExpiringBlocks(TTL_S, CAPACITY)
    prompt = list(range(1, CAPACITY + 1))
    blocks.insert(0, u64(prompt), 0.0)
    blocks.insert(1, u64([100, 101]), 0.0)
    assert depths(blocks, prompt, 1.0)[0] == CAPACITY - 2


def test_a_prompt_that_everybody_has_takes_the_room_of_one():
    blocks = ExpiringBlocks(TTL_S, CAPACITY)
    blocks.insert(0, u64([100]), 0.0)
    for _ in range(100):
        blocks.insert(0, u64([1, 2, 3]), 0.0)
    assert (len(blocks), blocks.num_lost) == (4, 0)


def test_overdue_entries_make_room_without_loss():
    blocks = ExpiringBlocks(TTL_S, CAPACITY, max_more_expired=0)
    blocks.insert(0, u64(range(1, CAPACITY + 1)), 0.0)
    blocks.insert(0, u64([100]), 3.0)
    assert (len(blocks), blocks.num_lost) == (CAPACITY, 0)


def test_it_grows_with_what_it_has_to_remember():
    rng, version = np.random.default_rng(0), ArrayVersion()
    blocks = ExpiringBlocks(TTL_S, capacity=3000, version=version)
    for step in range(40):
        hashes = rng.integers(1, 2**63, int(rng.integers(1, 400)), dtype=np.uint64)
        blocks.insert(step, hashes, step / 10)
        assert depths_of_all(blocks, hashes, step / 10)[step] == len(hashes)


def depths_of_all(blocks, hashes, now_s):
    return blocks.extend(hashes, np.zeros(40, dtype=np.int64), now_s).tolist()


def test_memory_is_that_of_the_arrays():
    blocks = ExpiringBlocks(TTL_S)
    assert blocks.nbytes < 20_000
    blocks.insert(0, u64(range(1, 1001)), 0.0)
    arrays = (*blocks.query_arrays, *blocks.ring)
    assert blocks.nbytes == sum({id(array): array.nbytes for array in arrays}.values())
    assert blocks.nbytes >= 1000 * (16 + 28)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda b: b.table.put(u64([77]), u64([1])), "no node in use, or another's"),
        (lambda b: b.table.put(u64([5]) ^ mark_of(0), u64([4])), "no node in use"),
        (lambda b: b.ring[1].__setitem__(b.ring[3][0], 99.0), "deadlines do not ascend"),
        (lambda b: b.ring[2].__setitem__(1, 1), "not linked in one circle"),
        (lambda b: b.ring[3].__setitem__(4, 7), "per rank"),
        (lambda b: b.ring[3].__setitem__(2, 1), "do not end at NEXT"),
    ],
)
def test_check_finds_what_is_broken(break_it, sentence):
    blocks = ExpiringBlocks(TTL_S)
    blocks.insert(0, u64([5, 6]), 0.0)
    blocks.insert(1, u64([5]), 1.0)
    blocks.check()
    break_it(blocks)
    with pytest.raises(IndexCorruptError, match=sentence):
        blocks.check()
