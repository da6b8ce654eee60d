import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import hashing
from tests.kernels import references

u32s, u64s = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def blocks(tokens, block_size, seed=1337):
    tokens = np.array(tokens, dtype=np.uint32)
    out = np.empty(len(tokens) // block_size, dtype=np.uint64)
    hashing.hash_blocks(tokens, block_size, block_size, np.uint64(seed), out)
    return out.tolist()


def chain(block_hashes, parent=None, seed=1337):
    out = np.empty(len(block_hashes), dtype=np.uint64)
    array = np.array(block_hashes, dtype=np.uint64)
    hashing.chain_blocks(array, parent is not None, np.uint64(parent or 0), np.uint64(seed), out)
    return out.tolist()


@given(st.lists(u32s, max_size=90), st.integers(1, 80), u64s)
def test_blocks_hash_as_xxh3_does(tokens, block_size, seed):
    assert blocks(tokens, block_size, seed) == references.hash_blocks(tokens, block_size, seed)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 32, 33, 60, 61, 64, 128, 256, 257, 272, 513])
def test_every_length_class_of_xxh3(block_size):
    tokens = [(i * 2654435761) % 2**32 for i in range(2 * block_size + 1)]
    assert blocks(tokens, block_size) == references.hash_blocks(tokens, block_size, 1337)


@given(st.lists(u64s, max_size=20), st.none() | u64s, u64s)
def test_sequence_hashes_chain(block_hashes, parent, seed):
    assert chain(block_hashes, parent, seed) == references.chain_blocks(block_hashes, parent, seed)


def test_a_chain_continues_from_its_parent():
    whole = chain([1, 2, 3, 4, 5])
    assert chain([4, 5], parent=whole[2]) == whole[3:]


def test_equal_to_dynamo_1_6_1():
    # ai-dynamo-runtime 1.6.1: compute_block_hash_for_seq([1, 2, 3, 4], 4)
    assert blocks([1, 2, 3, 4], 4) == [14643705804678351452]


@given(st.lists(u32s, max_size=90), st.integers(1, 40), st.integers(0, 3), u64s)
def test_windows_may_overlap(tokens, stride, more, seed):
    window = stride + more
    out = np.empty(max(0, len(tokens) - more) // stride, dtype=np.uint64)
    array = np.array(tokens, dtype=np.uint32)
    hashing.hash_blocks(array, window, stride, np.uint64(seed), out)
    assert out.tolist() == references.hash_windows(tokens, window, stride, seed)


@given(
    st.lists(u32s, max_size=150),
    st.integers(1, 70) | st.sampled_from([16, 32]),
    st.integers(0, 1),
    u64s,
    st.none() | u64s,
)
def test_a_sequence_hashes_as_its_blocks_and_their_chain(tokens, stride, more, seed, parent):
    window, array = stride + more, np.array(tokens, dtype=np.uint32)
    out = np.empty(max(0, len(tokens) - more) // stride, dtype=np.uint64)
    before, chain_seed = (parent is not None, np.uint64(parent or 0)), np.uint64(1337)
    hashing.hash_sequence(array, window, stride, np.uint64(seed), *before, chain_seed, out)
    block_hashes = references.hash_windows(tokens, window, stride, seed)
    assert out.tolist() == references.chain_blocks(block_hashes, parent, 1337)


@given(st.lists(st.tuples(st.lists(u32s, max_size=40), u64s), max_size=6), st.integers(1, 9))
def test_many_sequences_hash_as_each_alone(sequences, block_size):
    alone = [references.hash_blocks(tokens, block_size, seed) for tokens, seed in sequences]
    expected = [h for hashes in alone for h in references.chain_blocks(hashes, None, 1337)]
    tokens = np.array([t for tokens, _ in sequences for t in tokens], dtype=np.uint32)
    ends = np.cumsum([len(tokens) for tokens, _ in sequences], dtype=np.int64)
    block_ends = np.cumsum([len(hashes) for hashes in alone], dtype=np.int64)
    seeds, out = np.array([s for _, s in sequences], np.uint64), np.zeros(len(expected), np.uint64)
    sizes, chain_seed = (block_size, block_size), np.uint64(1337)
    hashing.hash_sequences(tokens, ends, *sizes, seeds, chain_seed, block_ends, out)
    assert out.tolist() == expected
