"""KV cache groups of hybrid models: which of them a prefix needs, rule by rule."""

import pytest

from kvplug import codec
from kvplug.events import BlockCopied, BlockRemoved, EventBatch, Tier
from kvplug.index.apply_result import RejectReason
from kvplug.records import read_payloads
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from tests.index.four_blocks import TOKENS, A, apply, hashes_of, index_of, stored

WINDOW = {"attention": "sliding_window", "sliding_window": 8}  # 7 tokens: 2 blocks of 4
MAMBA = {"attention": "mamba"}


def held(index):
    return int(index.overlap(hashes_of(index)).held[0])


def removed(*names, **more):
    return BlockRemoved(block_hashes=names, **more)


def test_a_prefix_ends_where_a_window_has_what_it_needs():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4), stored(1, 2, 3, 4, group=1, **WINDOW))
        assert held(index) == 4
        apply(index, A, removed(3, group=1))
        assert held(index) == 2  # blocks 1 and 2; 4 alone is too little
        apply(index, A, removed(1, group=1))
        assert held(index) == 0
        apply(index, A, stored(3, start=2, parent=2, group=1, **WINDOW))
        assert held(index) == 4


def test_all_blocks_in_the_window_are_enough():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4), stored(1, group=1, **WINDOW))
        assert held(index) == 1


def test_the_window_may_come_before_the_group_with_full_attention():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, **WINDOW), stored(1, 2, 3, 4, group=1))
        assert held(index) == 3
        apply(index, A, removed(1, 2, 3))
        assert held(index) == 0
        assert sorted(index.engine_hashes_of(A, group=1).tolist()) == [1, 2, 3, 4]


def test_a_state_is_needed_at_the_end_alone():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4), stored(3, start=2, parent=2, group=1, **MAMBA))
        assert held(index) == 3


def test_every_group_with_full_attention_needs_all():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4), stored(1, 2, 3, 4, group=1))
        assert held(index) == 4
        apply(index, A, removed(2, group=1))
        assert held(index) == 1
        assert index.num_resident(A) == 4


def test_a_window_of_unknown_length_needs_all():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3), stored(2, 3, start=1, parent=1, group=1,
                                                 attention="sliding_window"))  # fmt: skip
        assert held(index) == 0


def test_a_model_with_nothing_but_windows_may_miss_the_beginning():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4, **WINDOW))
        apply(index, A, removed(1), removed(2))
        assert held(index) == 4
        assert index.overlap(hashes_of(index)).credit.tolist() == [4.0]
        assert int(index.overlap(hashes_of(index)[:3]).held[0]) == 0
        assert index.num_resident(A) == 2


def test_a_group_that_has_skipped_all_blocks_allows_nothing():
    with index_of(A) as index:
        copied = BlockCopied(block_hashes=(), group=1, **WINDOW)
        apply(index, A, stored(1, 2, 3, 4), copied)
        assert held(index) == 0


def test_a_group_is_followed_on_the_device_alone():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3), stored(1, 2, 3, group=1, **WINDOW))
        in_host = BlockCopied(block_hashes=(1, 2), tier=Tier.HOST, group=1)
        another = stored(3, start=2, parent=2, tier=Tier.HOST, group=1, **WINDOW)
        applied = apply(index, A, in_host, another)
        assert applied.rejected == {RejectReason.GROUP_TIER.value: 3}
        assert apply(index, A, removed(1, tier=Tier.HOST, group=1)).rejected == {
            RejectReason.UNKNOWN_BLOCK.value: 1
        }
        assert held(index) == 3


def test_a_group_with_blocks_of_another_size_is_refused_by_name():
    with index_of(A) as index:
        event = stored(1, tokens=range(8), group=1, **WINDOW)
        event = type(event)(**{**{f: getattr(event, f) for f in event.__struct_fields__},
                               "block_size": 8, "token_ids": tuple(range(8))})  # fmt: skip
        applied = apply(index, A, stored(1, 2), event)
        assert applied.rejected == {RejectReason.GROUP_BLOCK_SIZE.value: 1}


def test_an_engine_that_comes_back_with_another_model_is_learnt_anew():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3), stored(1, 2, 3, group=1, **WINDOW))
        index.clear(A)
        apply(index, A, stored(1, 2, 3, **WINDOW), stored(1, 2, 3, group=1))
        assert held(index) == 3
        apply(index, A, removed(3))
        assert held(index) == 2


@pytest.mark.parametrize("named", ["before", "after"])
def test_what_a_group_leaves_out_is_known_by_name_whatever_comes_first(named):
    copied = BlockCopied(block_hashes=(2, 3), **WINDOW)
    events = [copied, stored(1, 2, 3, 4, group=1)]
    batch = EventBatch(events=tuple(events if named == "before" else events[::-1]))
    with index_of(A) as index:
        applied = index.apply(A, codec.decode(codec.encode(batch)))
        assert (applied.num_stored, applied.rejected) == (6, {})
        assert held(index) == 3


def test_removals_that_kernels_could_read_are_of_their_group():
    """Group 0 is nothing special: here it is a window's."""
    with index_of(A) as index:
        apply(index, A, stored(1, 2, 3, 4, **WINDOW), stored(1, 2, 3, 4, group=1))
        payload = codec.encode(EventBatch(events=(removed(4),)))
        records = read_payloads([payload])
        assert records is not None
        applied = index.apply(A, EventBatch(events=()))
        assert index.apply_records(A, records, 0, 100, applied) == 1
        assert len(index.engine_hashes_of(A, group=1)) == 4
        assert held(index) == 3


def test_a_window_ends_before_the_last_token():
    """An engine computes it in any case, so of a prompt of whole blocks it needs one block less."""
    router = Router(RouterConfig(block_size=4, speculative_ttl_s=0))
    router.add_worker("a")
    window = stored(2, 3, 4, start=1, parent=1, group=1, **WINDOW)
    router.apply(A, EventBatch(events=(stored(1, 2, 3, 4), window)))
    assert router.route(TOKENS).overlap_blocks == 3
    router.apply(A, EventBatch(events=(removed(2, group=1),)))
    assert router.route([*TOKENS, 99]).overlap_blocks == 4
    assert router.route(TOKENS).overlap_blocks == 0
