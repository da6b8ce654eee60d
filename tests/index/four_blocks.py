"""An index over four blocks of four tokens, for tests of single rules."""

from contextlib import contextmanager

from kvplug import codec
from kvplug.events import BlockStored, EventBatch, Rank
from kvplug.hashing import as_tokens
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex
from kvplug.index.cxl import CxlBlocks
from kvplug.index.moe_labels import MoeLabels
from kvplug.records import read_payloads

A, B = Rank("a"), Rank("b")
TOKENS = tuple(range(16))


@contextmanager
def index_of(*ranks):
    """An index with these ranks; at the end it is sound, and the ranks leave nothing in it."""
    index = BlockIndex(4)
    for rank in ranks:
        index.add_rank(rank)
    yield index
    index.check()
    check_all_leave(index, {rank.worker for rank in ranks})


def check_all_leave(index, workers):
    """After the last worker has gone, no table holds anything."""
    for worker in sorted(workers):
        index.remove_worker(worker)
    index.check()
    block_store, cxl = index.block_store, index.annotation(CxlBlocks)
    sizes = len(index), len(block_store.copies), len(block_store.sets), len(block_store.runs)
    assert sizes == (0, 0, 0, 0)
    num_labels = len(index.annotation(MoeLabels))
    assert (len(cxl.states), len(cxl.placements), num_labels) == (0, 0, 0)
    assert set(index.numbers.owner.tolist()) == {-1}
    assert not index.hash_spaces


def stored(*names, tokens=TOKENS, start=0, parent=None, **more):
    chunk = tokens[4 * start : 4 * (start + len(names))]
    return BlockStored(block_hashes=names, token_ids=chunk, block_size=4, parent=parent, **more)


def apply(index, rank, *events):
    applied = index.apply(rank, EventBatch(events=events))
    index.check()
    return applied


def apply_record(index, rank, event):
    """Through the kernels, which have to take it."""
    records, applied = read_payloads([codec.encode(EventBatch(events=(event,)))]), ApplyResult()
    assert index.apply_records(rank, records, 0, 100, applied) == records.num_events
    index.check()
    return applied


def hashes_of(index, tokens=TOKENS):
    return index.hasher.sequence_hashes(as_tokens(tokens))
