"""The kernels of expiring blocks; the machine in tests/index drives them in all orders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.expiring import ExpiringBlocks
from kvplug.kernels import expiring as kernels
from tests.index.expiring_reference import ReferenceExpiring

NUM_RANKS = 4
block_lists = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=8, unique=True)
ranks = st.integers(0, NUM_RANKS - 1)


def u64(numbers):
    return np.array(numbers, dtype=np.uint64)


def test_marks_are_splitmix64():
    # The first outputs of the generator with seed 0, as its authors' splitmix64.c prints them.
    assert [int(kernels.mark_of(rank)) for rank in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(
    st.lists(st.tuples(ranks, st.integers(0, 8), st.floats(0, 5)), max_size=8),
    block_lists,
    st.lists(st.integers(0, 9), min_size=1, max_size=NUM_RANKS + 2),
    st.floats(0, 8),
)
def test_depths_move_on_over_what_is_live(inserted, prompt, starts, now_s):
    blocks, reference = ExpiringBlocks(2.0), ReferenceExpiring(2.0, 10**6, 64)
    for rank, end, at_s in sorted(inserted, key=lambda each: each[2]):
        blocks.insert(rank, u64(prompt[:end]), at_s)
        reference.insert(rank, prompt[:end], at_s)
    depths = np.array(starts, dtype=np.int64)
    kernels.extend_depths(now_s, u64(prompt), blocks.bundle, depths)
    assert depths.tolist() == [
        reference.depth(rank, prompt, start, now_s) for rank, start in enumerate(starts)
    ]


@given(block_lists, block_lists, ranks)
def test_what_is_confirmed_is_gone_and_nothing_else(inserted, confirmed, rank):
    blocks = ExpiringBlocks(2.0)
    for each in range(NUM_RANKS):
        blocks.insert(each, u64(inserted), 0.0)
    kernels.confirm(rank, u64(confirmed), blocks.table.slots)
    blocks.check()
    left = len(set(inserted) - set(confirmed))
    assert len(blocks) == (NUM_RANKS - 1) * len(inserted) + left


@pytest.mark.parametrize("num_due", [31, 32, 33, 64, 65, 100])
def test_as_many_expire_as_are_due_however_they_are_grouped(num_due):
    blocks = ExpiringBlocks(2.0)
    blocks.insert(0, u64(range(1, num_due + 1)), 0.0)
    blocks.insert(0, u64(range(1000, 1050)), 1.0)
    blocks.expire(2.5, num_due - 1)
    assert len(blocks) == 51
    blocks.expire(2.5, 10_000)
    assert len(blocks) == 50
    blocks.expire(3.0, 10_000)
    assert len(blocks) == 0
    blocks.check()


def test_hashes_may_be_read_only():
    blocks, hashes = ExpiringBlocks(2.0), u64([1, 2, 3])
    hashes.flags.writeable = False
    blocks.insert(0, hashes, 0.0)
    blocks.confirm(0, hashes[:1])
    assert len(blocks) == 2
