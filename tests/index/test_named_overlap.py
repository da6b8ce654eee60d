"""The index asked with tokens, and answers by rank."""

import pytest

from kvplug import BlockIndex, BlockStored, EventBatch, Namespace, Rank
from kvplug.errors import HashingError, UnknownRankError
from kvplug.events import Tier
from kvplug.hashing import BlockHasher, as_tokens, seed_of
from kvplug.index.prefix_query import RankOverlap

TOKENS = tuple(range(12))
A, B = Rank("a"), Rank("b", 1)


@pytest.fixture
def index():
    index = BlockIndex(4, speculative_ttl_s=2.0)
    for rank in (A, B):
        index.add_rank(rank)
    stored = BlockStored(block_hashes=(1, 2), token_ids=TOKENS[:8], block_size=4)
    salted = BlockStored(
        block_hashes=(7,), token_ids=TOKENS[:4], block_size=4, namespace=Namespace(salt="x"),
        tier=Tier.HOST,
    )  # fmt: skip
    index.apply(A, EventBatch(events=(stored,)))
    index.apply(B, EventBatch(events=(salted,)))
    return index


def test_tokens_are_hashed_as_events_are(index):
    overlap = index.overlap_of_tokens(list(TOKENS))
    assert overlap.of(A) == RankOverlap(2, 2.0, 2, 2, 2, 2, 2)
    assert overlap.of(B) == RankOverlap(0, 0.0, 0, 0, 0, 0, 0)
    salted = index.overlap_of_tokens(TOKENS, Namespace(salt="x"))
    assert salted.of(B) == RankOverlap(1, 0.75, 0, 1, 1, 0, 1)
    assert index.overlap_of_tokens([]).depth.tolist() == [0, 0]


def test_tokens_that_are_none_are_refused(index):
    with pytest.raises(HashingError):
        index.overlap_of_tokens([2**32])


def test_an_overlap_knows_the_ranks_of_its_time(index):
    hashes = index.hasher.sequence_hashes(TOKENS)
    before = index.overlap_many(hashes, [3])[0]
    index.remove_worker("a")
    index.add_rank(Rank("c"))
    assert before.of(A).depth == 2
    with pytest.raises(UnknownRankError, match="expected one that was added, known: a, b#1"):
        before.of(Rank("c"))
    assert index.overlap(hashes).of(Rank("c")).depth == 0


def test_what_a_rank_will_hold_is_said_of_the_rank(index):
    hashes = index.hasher.sequence_hashes(TOKENS)
    index.expect(B, hashes.tolist(), 10.0)
    assert index.overlap(hashes, 11.0).of(B).depth == 3
    assert index.overlap(hashes, 13.0).of(B).depth == 0


STRANGER = Rank("z")


@pytest.mark.parametrize(
    "ask",
    [
        lambda index: index.set_confidence(STRANGER, 1.0),
        lambda index: index.set_recomputed(STRANGER, 1),
        lambda index: index.engine_hashes_of(STRANGER),
        lambda index: index.num_resident(STRANGER),
        lambda index: index.forget_adapter(STRANGER, "lora"),
        lambda index: index.refuse_lower_tiers(STRANGER),
        lambda index: index.expect(STRANGER, [1], 0.0),
        lambda index: index.overlap([1]).of(STRANGER),
    ],
)
def test_nothing_is_asked_or_set_of_a_stranger(index, ask):
    with pytest.raises(UnknownRankError, match="cannot find rank z: expected one that was added"):
        ask(index)
    index.check()


def test_what_a_stranger_says_is_refused(index):
    stored = BlockStored(block_hashes=(1,), token_ids=TOKENS[:4], block_size=4)
    assert index.apply(STRANGER, EventBatch(events=(stored,))).rejected == {"unknown_rank": 1}
    assert index.clear(STRANGER) == 0


def test_hashers_take_lists_and_namespaces():
    hasher, namespace = BlockHasher(4), Namespace("lora", "salt")
    tokens = as_tokens(TOKENS)
    for hashes in (hasher.block_hashes, hasher.sequence_hashes):
        expected = hashes(tokens, seed_of(namespace)).tolist()
        assert hashes(list(TOKENS), namespace).tolist() == expected
    many = hasher.sequence_hashes_many(list(TOKENS), [8, 12], [namespace, 1337])
    alone = hasher.sequence_hashes(TOKENS[:8], namespace)
    assert many.hashes[: many.ends[0]].tolist() == alone.tolist()


@pytest.mark.parametrize(
    "ask",
    [
        lambda hasher: hasher.sequence_hashes(["x"]),
        lambda hasher: hasher.block_hashes("abcd"),
        lambda hasher: hasher.sequence_hashes(TOKENS, -1),
        lambda hasher: hasher.sequence_hashes(TOKENS, "lora"),
        lambda hasher: hasher.sequence_hashes(TOKENS, parent=2**64),
        lambda hasher: hasher.sequence_hashes_many(TOKENS, [12], [2**64]),
        lambda hasher: hasher.sequence_hashes_many(TOKENS, [12], []),
    ],
)
def test_what_cannot_be_hashed_is_said_in_one_sentence(ask):
    with pytest.raises(HashingError, match="expected"):
        ask(BlockHasher(4))
