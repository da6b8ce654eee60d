import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import ConfigError, HashingError
from kvplug.events import Namespace
from kvplug.hashing import BASE_SEED, BlockHasher, as_tokens, seed_of


def hashes(tokens, block_size=4, **how):
    return BlockHasher(block_size).sequence_hashes(as_tokens(tokens), **how).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 10))
def test_a_continuation_hashes_as_the_whole(tokens, num_blocks):
    whole = hashes(tokens)
    num_blocks = min(num_blocks, len(whole))
    parent = whole[num_blocks - 1] if num_blocks else None
    assert hashes(tokens[4 * num_blocks :], parent=parent) == whole[num_blocks:]


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
    firsts = {hashes(range(4), namespace_seed=seed_of(n))[0] for n in namespaces}
    assert len(firsts) == len(namespaces)


def test_seed_is_dynamos():
    lora, salt = (xxhash.xxh3_64_intdigest(b"x", seed) for seed in (0, 1))
    assert seed_of(Namespace()) == BASE_SEED == 1337
    assert seed_of(Namespace(lora_name="x", salt="x")) == (1337 + lora + salt) % 2**64


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
def test_what_is_no_token_id_is_refused(bad):
    with pytest.raises(HashingError, match="expected integers in"):
        as_tokens(bad)


def test_token_arrays_of_other_dtypes_are_taken():
    assert as_tokens(np.array([1, 2], dtype=np.int64)).tolist() == [1, 2]
    same = np.array([1, 2], dtype=np.uint32)
    assert as_tokens(same) is not None
    assert np.shares_memory(as_tokens(same), same)


@pytest.mark.parametrize("block_size", [0, -1, 2**16 + 1])
def test_block_sizes_out_of_range_are_refused(block_size):
    with pytest.raises(ConfigError, match="block_size must be in"):
        BlockHasher(block_size)
