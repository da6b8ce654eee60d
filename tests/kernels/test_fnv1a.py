import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import fnv1a
from tests.kernels import references

u32s, u64s = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
token_lists, block_sizes = st.lists(u32s, max_size=40), st.integers(1, 9)


def hashes_of(tokens, block_size, parent=0):
    out = np.empty(len(tokens) // block_size, dtype=np.uint64)
    tokens = np.array(tokens, dtype=np.uint32)
    fnv1a.hash_sequence(tokens, block_size, np.uint64(parent), out)
    return out.tolist()


@given(token_lists, block_sizes, u64s)
def test_blocks_hash_as_a_plain_loop_does(tokens, block_size, parent):
    assert hashes_of(tokens, block_size, parent) == references.fnv1a(tokens, block_size, parent)


@given(st.lists(token_lists, max_size=6), block_sizes)
def test_many_sequences_hash_as_each_alone(sequences, block_size):
    alone = [references.fnv1a(tokens, block_size, 0) for tokens in sequences]
    ends = np.cumsum([len(tokens) for tokens in sequences], dtype=np.int64)
    block_ends = np.cumsum([len(hashes) for hashes in alone], dtype=np.int64)
    out = np.zeros(sum(map(len, alone)), dtype=np.uint64)
    tokens = np.array([t for tokens in sequences for t in tokens], dtype=np.uint32)
    fnv1a.hash_sequences(tokens, ends, block_size, block_ends, out)
    assert out.tolist() == [h for hashes in alone for h in hashes]
