"""Copies in host memory and on disk, as vLLM's offloading connectors publish them."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug import codec
from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    EventBatch,
    Namespace,
    Tier,
)
from kvplug.index import snapshot
from kvplug.index.apply_result import ApplyResult
from kvplug.index.lower_tiers import LowerTiers
from kvplug.records import read_payloads
from tests.index.four_blocks import A, B, apply, apply_record, index_of, stored

CLEARED = AllBlocksCleared()


def copied(*names, tier=Tier.HOST):
    return BlockCopied(block_hashes=names, tier=tier)


def in_host(index, rank=A):
    return sorted(index.engine_hashes_of(rank, Tier.HOST).tolist())


def test_a_clear_leaves_what_a_connector_has_published():
    with index_of(A, B) as index:
        for rank in (A, B):
            apply(index, rank, stored(1, 2))
        apply(index, A, copied(1), copied(2))
        apply(index, B, stored(1, tier=Tier.HOST))  # an engine that empties all tiers
        for rank in (A, B):
            assert apply(index, rank, CLEARED).was_cleared == (rank is B)
        assert (in_host(index), in_host(index, B)) == ([1, 2], [])
        assert index.num_resident(A) == 0
        apply(index, A, AllBlocksCleared(tier=Tier.HOST))
        assert len(index) == 0


def test_a_clear_among_records_leaves_them_too():
    with index_of(A) as index:
        apply(index, A, stored(1, 2), copied(1))
        records, applied = (
            read_payloads([codec.encode(EventBatch(events=(CLEARED,)))]),
            ApplyResult(),
        )
        while index.apply_records(A, records, 0, 100, applied) < records.num_events:
            pass
        assert not applied.was_cleared
        assert in_host(index) == [1]


def test_copies_of_every_second_block_are_the_ends_of_chunks():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4))
        apply(index, A, copied(2), copied(4), copied(2))
        assert in_host(index) == [2, 4]  # which may be chance
        applied = apply(index, A, copied(4))
        assert (applied.num_cleared, applied.rejected) == (2, {"chunked_offload": 1})
        assert in_host(index) == []
        assert index.num_resident(A) == 4
        apply(index, A, copied(1))  # so they are not
        apply(index, A, copied(2))
        assert in_host(index) == [1, 2]


def test_a_copy_is_known_by_its_engine_hash_whatever_its_namespace():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, namespace=Namespace("", "salt")))
        apply(index, A, copied(1))
        apply(index, A, stored(2, start=1, parent=1, tier=Tier.HOST))
        assert in_host(index) == [1, 2]


def test_a_tier_that_is_refused_takes_nothing_by_any_way():
    with index_of(A) as index:
        apply(index, A, stored(1, 2), copied(1), stored(1, tier=Tier.DISK))
        index.refuse_lower_tiers(A)
        assert in_host(index) == []
        assert apply(index, A, copied(1)).rejected == {"refused_tier": 1}
        assert apply_record(index, A, stored(1, tier=Tier.DISK)).rejected == {"refused_tier": 1}
        removed = BlockRemoved(block_hashes=(1,), tier=Tier.HOST)
        assert apply(index, A, removed).rejected == {"unknown_block": 1}
        assert index.num_resident(A) == 2


@given(events=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), max_size=8))
def test_depths_that_are_all_multiples_are_of_chunks(events):
    tiers, ends = LowerTiers(), []
    assert not tiers.outlive_clears(0)
    for depths in events:
        ends += [depth + 1 for depth in depths]
        are_blocks = tiers.note_copies(0, np.array(depths))
        assert are_blocks == (math.gcd(*ends) == 1 or len(ends) < 4)
        assert tiers.outlive_clears(0)
    tiers.forget(0)
    assert not tiers.outlive_clears(0)


def test_a_restored_index_knows_what_ranks_offload(tmp_path):
    with index_of(A, B) as index:
        apply(index, A, stored(1, 2), copied(1))
        apply(index, B, stored(1, tier=Tier.HOST))
        index.refuse_lower_tiers(B)
        snapshot.save(index, tmp_path / "index")
        restored = snapshot.restore(tmp_path / "index")
        assert not apply(restored, A, CLEARED).was_cleared
        assert in_host(restored) == [1]
        assert apply(restored, B, stored(1, tier=Tier.DISK)).rejected == {"refused_tier": 1}
