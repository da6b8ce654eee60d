"""Runs of records leave the index as event by event would, whatever they hold."""

import random

import pytest

from kvplug import codec
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_index import BlockIndex
from kvplug.records import read_payloads

RANKS = [Rank("a"), Rank("b")]
SIZE = 4


@pytest.fixture
def index():
    return new_index()


def new_index():
    index = BlockIndex(SIZE)
    for rank in RANKS:
        index.add_rank(rank)
    return index


def stored(names, first_token, parent=None, **fields):
    ids = tuple(range(first_token, first_token + SIZE * len(names)))
    namespace = None if parent else Namespace()
    return BlockStored(
        block_hashes=tuple(names),
        token_ids=ids,
        block_size=SIZE,
        parent=parent,
        namespace=namespace,
        **fields,
    )


def apply_run(index, rank, *events, max_blocks=10**9):
    """As the bytes of one message per event; all of them must be plain."""
    payloads = [codec.encode(EventBatch(events=(event,))) for event in events]
    applied = ApplyResult()
    while payloads:
        records, at = read_payloads(payloads), 0
        while at < records.num_events:
            at = index.apply_records(rank, records, at, max_blocks, applied)
        del payloads[: records.num_payloads]
    index.check()
    return applied


def random_events(rng, num_events):
    """Chains that grow, blocks stored twice, removals of tails, middles and strangers."""
    chains = [[] for _ in range(8)]
    for _ in range(num_events):
        number = rng.randrange(len(chains))
        chain = chains[number]
        if rng.random() < 0.6:
            start = rng.randrange(len(chain) + 1)
            names = [10_000 * (number + 1) + i for i in range(start, start + rng.randrange(1, 9))]
            first = 1_000_000 * number + SIZE * start
            tier = rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
            yield stored(names, first, chain[start - 1] if start else None, tier=tier)
            chain[start : start + len(names)] = names
        else:
            names = rng.choices([*range(10_000, 10_005), *(chain[-6:] or [1])], k=3)
            tier = rng.choice([Tier.DEVICE, Tier.HOST])
            yield BlockRemoved(block_hashes=tuple(names), tier=tier)
    yield AllBlocksCleared(tier=Tier.HOST)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_blocks", [1, 20, 10**9])
def test_a_run_equals_its_events_one_by_one(seed, max_blocks):
    run, one_by_one = new_index(), new_index()
    for rank in RANKS:
        events = list(random_events(random.Random(seed), 400))
        applied = apply_run(run, rank, *events, max_blocks=max_blocks)
        expected = one_by_one.apply(rank, EventBatch(events=tuple(events)))
        assert applied == expected
    for rank in RANKS:
        for tier in Tier:
            held = [sorted(i.engine_hashes_of(rank, tier).tolist()) for i in (run, one_by_one)]
            assert held[0] == held[1]


def test_tables_grow_in_the_middle_of_a_run(index):
    events = [stored([10 * i + 1 + j for j in range(8)], 1000 * i) for i in range(3000)]
    assert apply_run(index, RANKS[0], *events).num_stored == 24_000
    assert len(index) == 24_000
    names = [int(name) for name in index.engine_hashes_of(RANKS[0])]
    removed = [BlockRemoved(block_hashes=tuple(names[i : i + 50])) for i in range(0, 24_000, 50)]
    assert apply_run(index, RANKS[0], *removed).num_removed == 24_000
    assert len(index) == 0


def test_an_event_of_more_blocks_than_the_scratch_has_room_for(index):
    assert apply_run(index, RANKS[0], stored(range(1, 2001), 0)).num_stored == 2000


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([7, 8, 7], 100), RejectReason.CONFLICTING_HASH),
        (stored([1], 100), RejectReason.CONFLICTING_HASH),  # the name has another content
        (stored([9, 2], 0), RejectReason.CONFLICTING_HASH),  # the content has another name
        (stored([7], 100, parent=99), RejectReason.UNKNOWN_PARENT),
        (
            BlockStored(
                block_hashes=(7, 8), token_ids=(1, 2, 3, 4), block_size=2, namespace=Namespace()
            ),
            RejectReason.BLOCK_SIZE,
        ),
        (BlockRemoved(block_hashes=(99,)), RejectReason.UNKNOWN_BLOCK),
    ],
)
def test_what_is_rejected_changes_nothing_and_the_rest_of_the_run_counts(index, event, reason):
    apply_run(index, RANKS[0], stored([1, 2, 3], 0))
    applied = apply_run(index, RANKS[0], event, stored([50], 5000))
    assert applied.rejected == {reason.value: len(event.block_hashes)}
    assert sorted(index.engine_hashes_of(RANKS[0]).tolist()) == [1, 2, 3, 50]


def test_a_rank_with_other_names_moves_to_a_hash_space_of_its_own_in_a_run(index):
    apply_run(index, RANKS[0], stored([1, 2, 3], 0), stored([4], 500))
    applied = apply_run(
        index, RANKS[1], stored([4], 500), stored([11, 12], 0), stored([13], 8, parent=12)
    )
    assert applied.num_stored == 4
    assert len(index.hash_spaces) == 2
    assert sorted(index.engine_hashes_of(RANKS[1]).tolist()) == [4, 11, 12, 13]
    apply_run(index, RANKS[0], BlockRemoved(block_hashes=(1, 2, 3, 4)))
    assert sorted(index.engine_hashes_of(RANKS[1]).tolist()) == [4, 11, 12, 13]


def test_a_full_clear_is_told_and_ends_what_was_orphaned(index):
    applied = apply_run(
        index, RANKS[0], stored([1], 0, parent=9), AllBlocksCleared(), stored([2], 0)
    )
    assert (applied.was_cleared, applied.num_orphans) == (True, 0)
    applied = apply_run(index, RANKS[0], AllBlocksCleared(tier=Tier.HOST), stored([3], 0, parent=9))
    assert (applied.was_cleared, applied.num_orphans) == (False, 1)


def test_unknown_ranks_are_rejected(index):
    applied = apply_run(index, Rank("stranger"), stored([1], 0), stored([2], 9))
    assert applied.rejected == {RejectReason.UNKNOWN_RANK.value: 2}


def test_reported_blocks_are_no_longer_speculative(index):
    event = stored([1, 2, 3], 0)
    hashes = index.hasher.sequence_hashes(as_tokens(event.token_ids))
    index.speculative.insert(index.numbers.number_of(RANKS[0]), hashes, 0.0)
    assert len(index.speculative) == 3
    apply_run(index, RANKS[0], event)
    assert len(index.speculative) == 0
