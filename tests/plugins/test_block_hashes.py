"""The publisher's hashes are the index's, bit by bit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import hashing
from kvplug.engines.block_hashes import BlockHashes, seed_of
from kvplug.errors import HashingError
from kvplug.events import Namespace

u64 = st.integers(0, 2**64 - 1)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(
    token_lists,
    st.integers(1, 20),
    st.booleans(),
    u64,
    st.none() | u64,
    st.lists(st.lists(u64, max_size=3), max_size=8),
)
def test_sequence_hashes_are_those_of_the_hasher(tokens, size, bigrams, seed, parent, keys):
    mine = BlockHashes(size, bigrams=bigrams)
    hasher = hashing.BlockHasher(size, bigrams=bigrams)
    expected = hasher.sequence_hashes(tokens, seed, parent=parent, extra_keys=keys)
    assert mine.sequence_hashes(tokens, seed, parent=parent, extra_keys=keys) == expected.tolist()


texts = st.text(st.characters(codec="utf-8"), max_size=8)


@given(texts, texts)
def test_seeds_are_those_of_the_hasher(lora_name, salt):
    namespace = Namespace(lora_name, salt)
    assert seed_of(namespace) == hashing.seed_of(namespace)


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"]])
def test_what_is_no_token_is_an_error(tokens):
    with pytest.raises(HashingError):
        BlockHashes(1).sequence_hashes(tokens)


def test_half_a_character_is_an_error():
    with pytest.raises(HashingError):
        seed_of(Namespace(salt="\ud800"))
