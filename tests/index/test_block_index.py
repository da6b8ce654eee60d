"""The rules of the index, one by one; the state machine beside this file mixes them."""

import numpy as np
import pytest

from kvplug.errors import HashingError, IndexCorruptError
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlState,
    CxlStateTransition,
    EventBatch,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens, seed_of
from kvplug.index.apply_result import RejectReason
from kvplug.index.block_index import BlockIndex
from kvplug.kernels import runs
from tests.index.four_blocks import TOKENS, A, B, apply, apply_record, hashes_of, index_of, stored


@pytest.fixture
def index():
    with index_of(A, B) as index:
        yield index


def depth(index, rank, tokens=TOKENS, namespace=Namespace()):  # noqa: B008 - immutable
    hashes = index.hasher.sequence_hashes(as_tokens(tokens), seed_of(namespace))
    return int(index.overlap(hashes, now_s=0.0).depth[index.numbers.number_of(rank)])


def test_two_copies_take_two_removals(index):
    apply(index, A, stored(1, 2), stored(2, start=1, parent=1))
    apply(index, A, BlockRemoved(block_hashes=(2,)))
    assert depth(index, A) == 2
    apply(index, A, BlockRemoved(block_hashes=(2,)))
    assert depth(index, A) == 1


@pytest.mark.parametrize("way", ["apply", "records"])
def test_what_clients_have_the_engine_say_again_leaves_with_the_one_removal(index, way):
    """VLLM 0.32 publishes a reused prefix again for `kv_cache_report_mode=full`."""
    how = {"apply": apply, "records": apply_record}[way]
    how(index, A, stored(1, 2, 3))
    for _ in range(3):
        how(index, A, stored(1, 2, 3))
        how(index, A, stored(1, 2))
    assert depth(index, A) == 3
    for name in (3, 2, 1):
        how(index, A, BlockRemoved(block_hashes=(name,)))
    assert len(index) == 0


def test_a_report_of_blocks_under_other_names_is_a_conflict(index):
    apply(index, A, stored(1, 2))
    assert apply(index, A, stored(1, 9)).rejected == {"conflicting_hash": 2}


def test_hybrid_models_compute_anew_what_a_group_has(index):
    window = {"group": 1, "attention": "sliding_window", "sliding_window": 5}
    apply(index, A, stored(1, 2), stored(1, 2, **window))
    apply(index, A, stored(1, 2), BlockRemoved(block_hashes=(2,)))
    assert depth(index, A) == 2


def test_a_store_with_an_unknown_parent_is_counted_and_not_guessed(index):
    applied = apply(index, A, stored(3, 4, start=2, parent=2))
    assert applied.rejected == {"unknown_parent": 2}
    assert len(index) == 0


def test_a_missing_middle_block_ends_the_match_until_it_returns(index):
    apply(index, A, stored(1, 2, 3, 4))
    apply(index, A, BlockRemoved(block_hashes=(2,)))
    assert depth(index, A) == 1
    assert len(index) == 3
    apply(index, A, stored(2, start=1, parent=1))
    assert depth(index, A) == 4


def test_a_clear_is_of_one_rank(index):
    apply(index, A, stored(1, 2))
    apply(index, B, stored(1, 2))
    apply(index, A, AllBlocksCleared())
    assert (depth(index, A), depth(index, B)) == (0, 2)


def test_a_clear_may_name_a_tier(index):
    apply(index, A, stored(1), stored(1, tier=Tier.HOST))
    apply(index, A, AllBlocksCleared(tier=Tier.HOST))
    assert index.engine_hashes_of(A, Tier.HOST).tolist() == []
    assert index.engine_hashes_of(A, Tier.DEVICE).tolist() == [1]


def test_events_of_a_removed_worker_are_rejected(index):
    apply(index, A, stored(1, 2))
    index.remove_worker("a")
    assert len(index) == 0
    assert apply(index, A, stored(1, 2)).rejected == {"unknown_rank": 1}


def test_a_child_inherits_the_namespace_of_its_parent(index):
    salted = Namespace(salt="tenant")
    apply(index, A, stored(1, 2, namespace=salted), stored(3, start=2, parent=2))
    assert depth(index, A, namespace=salted) == 3
    assert depth(index, A) == 0


def test_a_copy_in_host_memory_is_confidence_less(index):
    apply(index, A, stored(1, 2), stored(3, 4, start=2, parent=2, tier=Tier.HOST))
    overlap = index.overlap(hashes_of(index), now_s=0.0)
    assert overlap.depth.tolist() == [4, 0]
    assert overlap.credit.tolist() == [2 + 2 * 0.75, 0]


def test_an_engine_with_other_hashes_gets_a_hash_space_of_its_own(index):
    apply(index, A, stored(1, 2))
    apply(index, B, stored(101, 102))  # the same content under other names
    assert len(index.hash_spaces) == 2
    assert (depth(index, A), depth(index, B)) == (2, 2)
    apply(index, A, BlockRemoved(block_hashes=(2,)))
    assert (depth(index, A), depth(index, B)) == (1, 2)


def test_an_engine_that_moves_keeps_what_it_had(index):
    apply(index, A, stored(1, 2))
    apply(index, B, stored(1, 2))
    other = tuple(range(100, 116))
    apply(index, A, stored(9, tokens=other))
    apply(index, B, stored(9))  # one name, another content than a's: they disagree
    assert len(index.hash_spaces) == 2
    assert sorted(index.engine_hashes_of(B).tolist()) in ([1, 2], [1, 2, 9])
    apply(index, B, BlockRemoved(block_hashes=(2,)))
    assert (depth(index, A), depth(index, B)) == (2, 1)


def test_one_name_for_two_contents_of_one_engine_is_rejected(index):
    index.remove_worker("b")
    apply(index, A, stored(1))
    applied = apply(index, A, stored(1, tokens=tuple(range(50, 54))))
    assert applied.rejected == {"conflicting_hash": 1}
    assert depth(index, A) == 1


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (BlockStored(block_hashes=(1,), token_ids=(1,) * 8, block_size=8), "block_size"),
        (BlockStored(block_hashes=(1, 2), token_ids=(1,) * 4, block_size=4), "misaligned"),
        (BlockStored(block_hashes=(1, 1), token_ids=(1,) * 8, block_size=4), "conflicting_hash"),
        (stored(1, extra_keys=((1,), (2,))), "misaligned"),
        (stored(1, tier=4), "bad_value"),
        (stored(1, tier="GPU"), "bad_value"),
        (stored(2**64), "bad_value"),
        (stored(-1), "bad_value"),
        (stored("a"), "bad_value"),
        (stored(1, parent=2**64), "bad_value"),
        (stored(1, tokens=(0, 1, 2, 2**32)), "bad_value"),
        (stored(1, tokens=(0, 1, 2, None)), "bad_value"),
        (BlockRemoved(block_hashes=(5,), tier=7), "bad_value"),
        (BlockRemoved(block_hashes=(2**64,)), "bad_value"),
        (BlockRemoved(block_hashes=(5,)), "unknown_block"),
        (CxlStateTransition(block_hashes=(5,), new_state=CxlState.EVICTED), "unknown_block"),
    ],
)
def test_what_is_not_certain_is_rejected_by_name(index, event, reason):
    assert list(apply(index, A, event).rejected) == [reason]
    assert len(index) == 0


def test_an_event_with_a_bad_value_takes_no_other_with_it(index):
    """The first one once stayed, the last was lost, and nothing was counted."""
    applied = apply(
        index, A, stored(1), stored(2**70, start=1, parent=1), stored(3, start=1, parent=1)
    )
    assert (applied.num_stored, applied.rejected) == (2, {"bad_value": 1})
    assert depth(index, A) == 2


def test_check_sees_a_broken_table(index):
    apply(index, A, stored(1, 2))
    sets = index.block_store.runs.column(runs.SET)
    set_id, sets[1] = sets[1], 0
    with pytest.raises(IndexCorruptError):
        index.check()
    sets[1] = set_id


def test_many_ranks_and_blocks_make_everything_grow():
    index, num_ranks = BlockIndex(4), 200
    tokens = tuple(range(4000))
    for number in range(num_ranks):
        rank = Rank(f"w{number}")
        index.add_rank(rank)
        names = tuple(range(1, 1001 - number))
        index.apply(rank, EventBatch(events=(stored(*names, tokens=tokens),)))
    index.check()
    overlap = index.overlap(hashes_of(index, tokens), now_s=0.0)
    assert overlap.depth.tolist() == [1000 - number for number in range(num_ranks)]
    for number in range(num_ranks):
        index.remove_worker(f"w{number}")
    index.check()
    assert len(index) == 0


def test_a_copy_named_by_engine_hash_alone_is_followed_where_its_content_is_known():
    index = BlockIndex(4)
    rank = Rank("w")
    index.add_rank(rank)
    stored = BlockStored(block_hashes=(1, 2), token_ids=tuple(range(8)), block_size=4)
    copied = BlockCopied(block_hashes=(1, 2, 3), tier=Tier.HOST)
    applied = index.apply(rank, EventBatch(events=(stored, copied)))
    assert (applied.num_stored, applied.rejected) == (4, {RejectReason.NO_TOKENS.value: 1})
    index.apply(rank, EventBatch(events=(BlockRemoved(block_hashes=(1, 2)),)))
    assert sorted(index.engine_hashes_of(rank, Tier.HOST).tolist()) == [1, 2]
    index.check()


@pytest.mark.parametrize("ends", [[2], [3, 1], [1, 4], [-1, 3], [], [1.0, 3.0], [[1, 3]]])
def test_many_requests_end_where_there_are_hashes(index, ends):
    with pytest.raises(HashingError, match="ends of sequences"):
        index.overlap_many([1, 2, 3], np.array(ends))
    with pytest.raises(HashingError, match="ends of sequences"):
        index.overlap_many([1, 2, 3], ends)


def test_ends_of_requests_may_be_a_list(index):
    assert len(index.overlap_many([1, 2, 3], [1, 3])) == 2
    assert index.overlap_many([], []) == []
    with pytest.raises(HashingError, match="ends of sequences"):
        index.overlap_many([1, 2, 3], [[1], [2, 3]])


@pytest.mark.parametrize(
    "hashes",
    [b"12345678", "text", [-1], [2**64], [1.5], np.ones((2, 2)), np.zeros((0, 4), np.uint64)],
)
def test_hashes_of_a_request_are_integers(index, hashes):
    expected = r"cannot use block hashes: expected integers in \[0, 2\*\*64\)"
    with pytest.raises(HashingError, match=expected):
        index.overlap(hashes)
    with pytest.raises(HashingError, match=expected):
        index.overlap_many(hashes, np.array([1]))


def test_many_requests_may_come_as_a_list(index):
    apply(index, A, stored(1, 2))
    hashes = index.hasher.sequence_hashes(as_tokens(TOKENS)).tolist()
    first, second = index.overlap_many([*hashes, hashes[0]], np.array([4, 5]))
    assert (first.depth.tolist(), second.depth.tolist()) == ([2, 0], [1, 0])


def test_the_same_question_gets_the_same_answer():
    """A border is crossed with what the first query has found there: {a, b}, {b}, {a, b, c}."""
    c, tokens = Rank("c"), tuple(range(24))
    with index_of(A, B, c) as index:
        for rank, start, num in ((B, 0, 4), (A, 0, 2), (A, 4, 2), (B, 4, 2), (c, 4, 2)):
            parent = 9 + start if start else None
            names = range(10 + start, 10 + start + num)
            apply(index, rank, stored(*names, tokens=tokens, start=start, parent=parent))
        for _ in range(3):
            overlap = index.overlap(hashes_of(index, tokens))
            assert overlap.depth.tolist() == [2, 6, 0]
            assert overlap.credit.tolist() == [2.0, 6.0, 0.0]
