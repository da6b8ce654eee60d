import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import ConfigError, HashingError
from kvplug.events import Namespace
from kvplug.hashing import BASE_SEED, BlockHasher, as_tokens, seed_of
from tests.kernels import references


def hashes(tokens, block_size=4, **how):
    return BlockHasher(block_size).sequence_hashes(as_tokens(tokens), **how).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 10))
def test_a_continuation_hashes_as_the_whole(tokens, num_blocks):
    whole = hashes(tokens)
    num_blocks = min(num_blocks, len(whole))
    parent = whole[num_blocks - 1] if num_blocks else None
    assert hashes(tokens[4 * num_blocks :], parent=parent) == whole[num_blocks:]


token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_lists, st.integers(1, 9), st.booleans())
def test_sequence_hashes_are_chained_block_hashes(tokens, block_size, bigrams):
    hasher, tokens = BlockHasher(block_size, bigrams=bigrams), as_tokens(tokens)
    block_hashes = hasher.block_hashes(tokens).tolist()
    assert len(block_hashes) == hasher.num_blocks(len(tokens))
    assert hasher.sequence_hashes(tokens).tolist() == references.chain_blocks(
        block_hashes, None, 1337
    )


@given(token_lists, st.integers(1, 9))
def test_blocks_of_bigrams_are_windows_of_one_token_more(tokens, block_size):
    hasher = BlockHasher(block_size, bigrams=True)
    assert hasher.num_blocks(len(tokens)) == max(0, (len(tokens) - 1) // block_size)
    expected = references.hash_windows(tokens, block_size + 1, block_size, 1337)
    assert hasher.block_hashes(as_tokens(tokens)).tolist() == expected


@given(st.lists(st.tuples(token_lists, st.integers(0, 2**64 - 1)), max_size=5), st.booleans())
def test_many_sequences_have_seeds_of_their_own(sequences, bigrams):
    hasher = BlockHasher(4, bigrams=bigrams)
    tokens = as_tokens([t for tokens, _ in sequences for t in tokens])
    ends = np.cumsum([len(tokens) for tokens, _ in sequences], dtype=np.int64)
    many = hasher.sequence_hashes_many(tokens, ends, [seed for _, seed in sequences])
    alone = [hasher.sequence_hashes(as_tokens(t), seed).tolist() for t, seed in sequences]
    assert many.hashes.tolist() == [h for hashes in alone for h in hashes]
    assert many.ends.tolist() == np.cumsum([len(hashes) for hashes in alone]).tolist()


def test_a_seed_for_each_sequence_or_for_none():
    for seeds in ([1], [1, 2, 3]):
        with pytest.raises(HashingError, match="expected 2 namespaces"):
            BlockHasher(4).sequence_hashes_many(as_tokens([1, 2]), np.array([1, 2]), seeds)


def test_the_trailing_partial_block_is_not_hashed():
    assert len(hashes(range(11))) == 2
    assert hashes(range(3)) == []


def test_lora_and_salt_separate_equal_tokens():
    namespaces = [
        Namespace(),
        Namespace(lora_name="a"),
        Namespace(salt="a"),
        Namespace(lora_name="a", salt="a"),
    ]
    firsts = {hashes(range(4), namespace=seed_of(n))[0] for n in namespaces}
    assert len(firsts) == len(namespaces)


def test_seed_is_dynamos():
    lora, salt = (xxhash.xxh3_64_intdigest(b"x", seed) for seed in (0, 1))
    assert seed_of(Namespace()) == BASE_SEED == 1337
    assert seed_of(Namespace(lora_name="x", salt="x")) == (1337 + lora + salt) % 2**64


@pytest.mark.parametrize("namespace", [Namespace("\ud800"), Namespace(salt="\ud800")])
def test_half_characters_are_rejected(namespace):
    with pytest.raises(HashingError, match="expected Unicode text"):
        seed_of(namespace)


def test_extra_keys_are_appended_sorted():
    tokens = np.arange(8, dtype=np.uint32)
    keyed = hashes(tokens, extra_keys=[[], [9, 3]])
    plain = hashes(tokens)
    appended = tokens[4:].tobytes() + np.array([3, 9], dtype="<u8").tobytes()
    block = xxhash.xxh3_64_intdigest(appended, 1337)
    chained = np.array([plain[0], block], dtype="<u8").tobytes()
    assert keyed == [plain[0], xxhash.xxh3_64_intdigest(chained, 1337)]
    assert hashes(tokens, extra_keys=[[], [3, 9]]) == keyed


@pytest.mark.parametrize(
    "bad", [[-1], [2**32], [1.5], ["1"], [None], np.array([-1]), np.array([0.5]), 7, "text"]
)
def test_what_is_no_token_id_is_rejected(bad):
    with pytest.raises(HashingError, match="expected integers in"):
        as_tokens(bad)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.float64])
@pytest.mark.parametrize("shape", [(), (1, 4), (4, 1), (2, 2), (0, 4), (2, 0), (1, 1, 1)])
def test_token_ids_that_are_not_in_a_row_are_rejected(dtype, shape):
    with pytest.raises(HashingError) as rejected:
        as_tokens(np.zeros(shape, dtype=dtype))
    expected = "cannot hash tokens: expected integers in [0, 2**32) in a row"
    assert str(rejected.value) == f"{expected}, got {np.dtype(dtype)}{shape}"


@given(st.lists(st.integers(-(2**33), 2**33) | st.booleans(), max_size=5))
def test_lists_and_tuples_are_taken_or_rejected_alike(token_ids):
    if all(0 <= token_id < 2**32 for token_id in token_ids):
        assert as_tokens(token_ids).tolist() == as_tokens(tuple(token_ids)).tolist() == token_ids
    else:
        for bad in (token_ids, tuple(token_ids)):
            with pytest.raises(HashingError, match="expected integers in"):
                as_tokens(bad)


def test_token_arrays_of_other_dtypes_are_taken():
    assert as_tokens(np.array([1, 2], dtype=np.int64)).tolist() == [1, 2]
    same = np.array([1, 2], dtype=np.uint32)
    assert as_tokens(same) is not None
    assert np.shares_memory(as_tokens(same), same)
    strided = as_tokens(np.arange(8, dtype=np.uint32)[::2])
    assert (strided.tolist(), strided.flags.c_contiguous) == ([0, 2, 4, 6], True)


@pytest.mark.parametrize("block_size", [0, -1, 2**16 + 1])
def test_block_sizes_out_of_range_are_rejected(block_size):
    with pytest.raises(ConfigError, match="block_size must be in"):
        BlockHasher(block_size)
