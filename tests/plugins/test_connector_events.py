"""What a KV connector says beyond vLLM's events, and what becomes of it on either wire."""

import pickle

import msgspec
import pytest

from kvplug import codec
from kvplug.engines.connector_events import BlockLabels, CxlStateTransition, with_labels
from kvplug.engines.stock_pools import StockPools
from kvplug.events import CxlMetadata, CxlState, MoeLabel, Namespace
from kvplug.wire import Cleared, Removed, Stored

EXPERT = MoeLabel(3, 7)


class BlockStored(msgspec.Struct, tag=True):
    """vLLM's, as far as it matters here."""

    block_hashes: list
    parent_block_hash: int | None = None
    token_ids: list = []
    block_size: int = 4
    extra_keys: list | None = None
    session_id: str | None = None


def stored(*names, parent=None, **more):
    tokens = list(range(4 * len(names)))
    return BlockStored(list(names), parent, tokens, **more)


def encoded(*events):
    """As they come out of an engine."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events))


def decoded(*events):
    return codec.decode(msgspec.msgpack.encode((0.0, events, 0)))


def test_a_transition_is_read_as_it_was_said():
    said = CxlStateTransition([1, 2], "cxl_pooled", 3, ["a"])
    [event] = decoded(said).events
    assert (event.block_hashes, event.new_state) == ((1, 2), CxlState.CXL_POOLED)
    assert (event.pool_id, event.accessible_workers) == (3, ("a",))
    [event] = decoded(CxlStateTransition((b"\1" * 32,), CxlState.EVICTED)).events
    assert (event.pool_id, event.accessible_workers) == (None, None)
    assert event.block_hashes == (int.from_bytes(b"\1" * 8, "big"),)


def test_equal_events_of_two_workers_are_one():
    for make in (
        lambda: CxlStateTransition([1, 2], "in_transit", 3, ["a"]),
        lambda: BlockLabels([1, 2], EXPERT),
    ):
        assert len({make(), make(), pickle.loads(pickle.dumps(make()))}) == 1


def test_a_state_that_is_none_is_refused_where_it_is_said():
    with pytest.raises(ValueError, match="'gone' is not a valid CxlState"):
        CxlStateTransition([1], "gone")


def test_labels_go_to_the_blocks_that_are_stored_with_them():
    events = [
        stored(1, 2, 3, parent=9, extra_keys=[("lora", "salt"), ("lora",), ("lora",)]),
        stored(4),
        BlockLabels([2, 3, 77], EXPERT),
    ]
    first, rest, other = decoded(*with_labels(encoded(*events))).events
    assert (first.block_hashes, first.parent, first.token_ids) == ((1,), 9, (0, 1, 2, 3))
    assert (rest.block_hashes, rest.parent, rest.token_ids) == ((2, 3), 1, tuple(range(4, 12)))
    assert [first.moe, rest.moe, other.moe] == [None, EXPERT, None]


def test_nothing_else_of_a_labelled_event_is_lost():
    event = stored(1, 2, extra_keys=[("salt",), None], session_id="s")
    [said] = encoded(event)
    [labelled] = with_labels(encoded(event, BlockLabels([1, 2], EXPERT)))
    assert labelled == said | {"moe": EXPERT}
    [read] = decoded(labelled).events
    assert (read.namespace, read.moe) == (Namespace(salt="salt"), EXPERT)


def test_an_event_that_leaves_out_blocks_is_not_divided():
    event = BlockStored([1], None, list(range(8)))
    [said] = with_labels(encoded(event, BlockLabels([1], EXPERT)))
    assert "moe" not in said


def test_events_without_labels_are_untouched():
    events = encoded(stored(1), CxlStateTransition([1], "in_transit"))
    assert with_labels(events) is events


def media(events):
    """What followers of the stock wire see: (is stored, medium, names)."""
    return [(isinstance(each, Stored), each.medium, each.block_hashes) for each in events]


def on_stock_wire(pools, state, *names):
    return media(pools.on_wire(encoded(CxlStateTransition(names, state))))


def test_of_a_connector_the_stock_wire_tells_what_the_pool_has():
    pools = StockPools(tells_device=True)
    assert on_stock_wire(pools, "in_transit", 1, 2) == []
    assert on_stock_wire(pools, "cxl_pooled", 1, 2) == [(True, "CXL", (1, 2))]
    assert on_stock_wire(pools, "cxl_pooled", 2, 3) == [(True, "CXL", (3,))]
    assert on_stock_wire(pools, "evicted", 1, 9) == [(False, "CXL", (1,))]
    assert on_stock_wire(pools, "local_gpu", 2) == [(False, "CXL", (2,))]
    assert on_stock_wire(pools, "evicted", 2) == []
    pools.on_wire([Cleared()])
    assert on_stock_wire(pools, "evicted", 3) == []


def test_of_an_engine_of_ones_own_it_tells_the_device_as_well():
    pools = StockPools(tells_device=False)
    twice = [Stored(block_hashes=(1, 2), token_ids=(), block_size=0, medium="GPU")] * 2
    pools.on_wire([*twice, Removed((2,), "GPU")])
    left = (False, "GPU", (1, 1, 2))
    assert on_stock_wire(pools, "cxl_pooled", 1, 2) == [(True, "CXL", (1, 2)), left]
    back = [(True, "GPU", (1,)), (False, "CXL", (1,))]
    assert on_stock_wire(pools, "in_transit", 1) == back
    assert on_stock_wire(pools, "evicted", 1) == [(False, "GPU", (1,))]
    assert on_stock_wire(pools, "evicted", 2) == [(False, "CXL", (2,))]


def test_a_block_that_is_stored_in_a_pool_is_of_its_medium():
    pools = StockPools(tells_device=False)
    pooled = CxlMetadata(CxlState.CXL_POOLED, 3)
    event = Stored(block_hashes=(1,), token_ids=(1,), block_size=1, medium="GPU")
    event.cxl_metadata = pooled
    assert media(pools.on_wire([event])) == [(True, "CXL", (1,))]
    assert on_stock_wire(pools, "evicted", 1) == [(False, "CXL", (1,))]
