"""The vocabulary: what other rooms rely on without saying so."""

import msgspec
import pytest

from kvplug import events
from kvplug.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Rank, Tier


def test_a_rank_is_written_as_worker_and_number():
    assert str(Rank("http://a:8000")) == "http://a:8000"
    assert str(Rank("http://a:8000", 2)) == "http://a:8000#2"


def test_ranks_are_ordered_and_hashable():
    ranks = [Rank("b"), Rank("a", 1), Rank("a")]
    assert sorted(ranks) == [Rank("a"), Rank("a", 1), Rank("b")]
    assert {Rank("a", 0): 1}[Rank("a")] == 1


def test_a_smaller_tier_is_nearer():
    assert Tier.DEVICE < Tier.HOST < Tier.DISK


@pytest.mark.parametrize(
    "value",
    [
        Rank("a"),
        BlockStored(block_hashes=(1,), token_ids=(5,), block_size=1),
        BlockRemoved(block_hashes=(1,)),
        EventBatch(events=()),
    ],
)
def test_values_cannot_change(value):
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], None)


def test_a_stored_event_says_nothing_that_was_not_said():
    event = BlockStored(block_hashes=(1,), token_ids=(5,), block_size=1)
    assert (event.parent, event.namespace, event.cxl, event.moe) == (None, None, None, None)
    assert (event.tier, event.group, event.extra_keys) == (Tier.DEVICE, 0, ())


def test_a_clear_is_of_all_tiers_and_a_removal_of_one():
    assert AllBlocksCleared().tier is None
    assert BlockRemoved(block_hashes=(1,)).tier is Tier.DEVICE


def test_batches_do_not_share_their_counts():
    one, other = EventBatch(events=()), EventBatch(events=())
    one.skipped["x"] = 1
    assert other.skipped == {}


def test_every_event_is_in_the_union():
    structs = {name for name, kind in vars(events).items() if isinstance(kind, type)}
    spoken = {kind.__name__ for kind in events.Event.__args__}
    assert spoken < structs
    assert all(issubclass(kind, msgspec.Struct) for kind in events.Event.__args__)
