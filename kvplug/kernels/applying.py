"""Many events of one rank to changed arrays of the index, in one call.

In:  records of plain events (kernels/wire.py) or packed events (kvplug/packed.py), and every array
     of the index.   Out: the arrays changed as kvplug/index/block_index.py changes them event by
     event, and how far it came.

An event that needs a decision (an unknown parent, conflicting engine
hashes, a clear, another block size, a form that is not read here) or more room is not begun: the
caller does what it takes and calls again.

Made of parts of other kernel files: a step per file would pass over the blocks of an event five
times and cross from Python as often. Reference: BlockIndex.apply.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import msgpack, packed, runs, wire
from kvplug.kernels._jit import i8, inlined, kernel, load_u64, reads, u8
from kvplug.kernels.bundle import i64_of, u1_of, u64_of
from kvplug.kernels.hashing import fill_sequence_hashes
from kvplug.kernels.remove import NOT_HELD, can_remove, nothing_left, remove_from_holder
from kvplug.kernels.residency import NUM_ARRAYS, Blocks, SpaceArrays, blocks_of, hash_of
from kvplug.kernels.store import can_store, claim, has_all, hold
from kvplug.kernels.table import (
    NUM_PREFETCHED,
    capacity_of,
    delete,
    num_entries,
    num_over_limit,
    prefetch_first,
    prefetch_key,
    prefetch_next,
    value_of,
)

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

# Why a call ended.
DONE, NEEDS_ROOM, NEEDS_RUNS, NEEDS_DECISION, OVER_LIMIT, NEEDS_CHECK = range(6)
# out_counts
NUM_STORED, NUM_REMOVED, NUM_UNKNOWN = 0, 1, 2
WHY, NUM_WANTED, POSITION, BEHIND = 3, 4, 5, 6
NUM_COUNTS = 7
_BASE_SEED = np.uint64(1337)  # kvplug/hashing.py
REMOVED_SHIFT = 31
STORED_MASK = 2**REMOVED_SHIFT - 1
_0, _1, _2, _8 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(8)
# The arrays of a bundle (kernels/bundle.py) behind those of the block store. EXPECTED: the table of
# kernels/expiring.py. OF_RANK has, in a word each: the rank's mark in that table, and its holder in
# each tier, -1 for none. IS_WANTED[0]: whether another thread waits for the index. REPORTS[0]:
# whether the engine has said again what it has (kvplug/index/repeated_stores.py).
SPACE_SLOTS, MEMBERS, EXPECTED, OF_RANK, SCRATCH, PAYLOAD, COUNTS, IS_WANTED, REPORTS = range(
    NUM_ARRAYS, NUM_ARRAYS + 9
)


class _Scratch(NamedTuple):
    """Room for the blocks of one event."""

    hashes: U64
    engine_hashes: U64
    at: U64


class _Index(NamedTuple):
    """What an event changes. expected: the table of kvplug/index/expiring.py; device: the holder of
    what the rank has on its device; reports: REPORTS, or none of it if every store brings copies.
    """

    blocks: Blocks
    space: SpaceArrays
    expected: U64
    mark: np.uint64
    device: Index
    reports: Bytes


class _Record(NamedTuple):
    """The words of a record (kernels/wire.py), and the parts that they count."""

    words: I64
    parent: np.uint64
    engine_hashes: U64
    tokens: U32


@inlined
def _scratch(bundle: U64) -> _Scratch:
    words = u64_of(bundle, SCRATCH)
    third = len(words) // 3
    return _Scratch(words[:third], words[third : 2 * third], words[2 * third : 3 * third])


@inlined
def _index(bundle: U64, reports: Bytes) -> _Index:
    space = SpaceArrays(u64_of(bundle, SPACE_SLOTS), u64_of(bundle, MEMBERS))
    mark, device = u64_of(bundle, OF_RANK)[0], np.int64(u64_of(bundle, OF_RANK)[1])
    return _Index(blocks_of(bundle), space, u64_of(bundle, EXPECTED), mark, device, reports)


@inlined
def _holder_of(bundle: U64, tier: Index) -> Index:
    return np.int64(u64_of(bundle, OF_RANK)[1 + tier])


@inlined
def _stop(why: Index, num_blocks: Index, out_counts: I64) -> bool:
    """False."""
    out_counts[WHY], out_counts[NUM_WANTED] = why, num_blocks
    return False


@inlined
def _is_report(index: _Index, at: U64) -> bool:
    """Whether blocks from the start of a prompt are no further copies on the rank's device
    (kvplug/index/repeated_stores.py).
    """
    reports = index.reports
    if len(reports) == 0 or (len(at) == 1 and reports[0] == 0):
        return False
    if not has_all(index.blocks, index.device, at):
        return False
    reports[0] = 1
    return True


@inlined
def _hold(
    index: _Index, holder: Index, engine_hashes: U64, hashes: U64, at: U64,
    parent: np.uint64, seed: np.uint64, out_counts: I64,
) -> bool:  # fmt: skip
    """The holder stores blocks behind the one with hash `parent`; False, and nothing done, if there
    is a reason in out_counts.
    """
    blocks, place = index.blocks, _0
    num_over = num_over_limit(blocks.table, hashes)
    if num_over > 0:
        return _stop(OVER_LIMIT, num_over, out_counts)
    if parent != _0:
        place = value_of(blocks.table, parent)
        seed = runs.get(blocks.runs, runs.run_of(place), runs.SEED)
    depth = _0 if parent == _0 else runs.depth_of(place) + _1
    if not claim(blocks, index.space, engine_hashes, hashes, depth, at):
        return _stop(NEEDS_DECISION, len(hashes), out_counts)
    if not (depth == _0 and holder == index.device and _is_report(index, at)):
        hold(blocks, holder, hashes, at, depth, runs.run_of(place), parent, seed)
    if num_entries(index.expected) != _0:
        for i in range(len(hashes)):
            delete(index.expected, hashes[i] ^ index.mark)
    out_counts[NUM_STORED] += len(hashes)
    return True


@inlined
def _drop(index: _Index, holder: Index, engine_hashes: U64, hashes: U64) -> Index:
    """Returns how many of the blocks the holder had."""
    num_removed = 0
    last = nothing_left()
    blocks, slots = index.blocks, index.space.slots
    prefetch_first(slots, engine_hashes)
    for i in range(len(engine_hashes)):
        prefetch_next(slots, engine_hashes, i, capacity_of(slots))
        hashes[i] = hash_of(index.space, engine_hashes[i])
    prefetch_first(blocks.table, hashes)
    for i in range(len(engine_hashes)):
        prefetch_next(blocks.table, hashes, i, capacity_of(blocks.table))
        if hashes[i] != _0:
            became, last = remove_from_holder(
                blocks, index.space, engine_hashes[i], hashes[i], holder, last
            )
            num_removed += became != NOT_HELD
    return num_removed


@inlined
def _has_room(
    index: _Index, kind: Index, holder: Index, num_blocks: Index, scratch: _Scratch, out_counts: I64
) -> bool:
    """False, with the reason in out_counts, if an event must wait until arrays have grown."""
    fits = num_blocks <= len(scratch.at)
    if kind == wire.REMOVED:
        if not (fits and can_remove(index.blocks, holder, num_blocks)):
            return _stop(NEEDS_RUNS, num_blocks, out_counts)
    elif not (fits and can_store(index.blocks, index.space, holder, num_blocks)):
        return _stop(NEEDS_ROOM, num_blocks, out_counts)
    return True


@inlined
def _count_removed(num_blocks: Index, num_removed: Index, out_counts: I64) -> None:
    out_counts[NUM_REMOVED] += num_removed
    out_counts[NUM_UNKNOWN] += num_blocks - num_removed


@inlined
def _record_of(events: wire.Events, number: Index) -> _Record:
    words = events.records[wire.RECORD_WIDTH * number : wire.RECORD_WIDTH * (number + 1)]
    first, token = words[wire.FIRST_ENGINE_HASH], words[wire.FIRST_TOKEN]
    engine_hashes = events.engine_hashes[first : first + words[wire.NUM_ENGINE_HASHES]]
    tokens = events.tokens[token : token + words[wire.NUM_TOKENS]]
    return _Record(words, events.parents[number], engine_hashes, tokens)


@inlined
def _is_plain(words: I64, block_size: Index) -> bool:
    """Whether a record removes blocks, or stores some of the index's size."""
    is_stored = words[wire.KIND] == wire.STORED and words[wire.BLOCK_SIZE] == block_size
    return bool(is_stored or words[wire.KIND] == wire.REMOVED)


@inlined
def _store_record(
    index: _Index, record: _Record, holder: Index, scratch: _Scratch, out_counts: I64
) -> bool:
    """As _hold, for a record."""
    n, parent, seed = len(record.engine_hashes), _0, _BASE_SEED
    if record.words[wire.HAS_PARENT] != 0:
        parent = hash_of(index.space, record.parent)
        if parent == _0:
            return _stop(NEEDS_DECISION, n, out_counts)
        run = runs.run_of(value_of(index.blocks.table, parent))
        seed = runs.get(index.blocks.runs, run, runs.SEED)
    size, hashes, at = record.words[wire.BLOCK_SIZE], scratch.hashes[:n], scratch.at[:n]
    fill_sequence_hashes(record.tokens, size, seed, parent, _BASE_SEED, hashes)
    return _hold(index, holder, record.engine_hashes, hashes, at, parent, seed, out_counts)


@inlined
def _apply_record(
    index: _Index, record: _Record, holder: Index, scratch: _Scratch, out_counts: I64
) -> bool:
    """As _store_record, for a record that stores or removes."""
    kind, n = record.words[wire.KIND], len(record.engine_hashes)
    if not _has_room(index, kind, holder, n, scratch, out_counts):
        return False
    if kind == wire.STORED:
        return _store_record(index, record, holder, scratch, out_counts)
    num_removed = _drop(index, holder, record.engine_hashes, scratch.hashes[:n])
    _count_removed(n, num_removed, out_counts)
    return True


@kernel(i8(i8, i8, i8, i8, reads(u8), reads(u8)), releases_gil=True)
def apply_records(
    first: Index, last: Index, max_blocks: Index, block_size: Index, records: U64, bundle: U64
) -> Index:
    """Apply records first..last of a bundle of kernels/wire.py; returns the number of the first
    that was not applied.

    Ends early once `max_blocks` blocks are done, or after the event at hand when another thread has
    set IS_WANTED[0]. In COUNTS then: NUM_STORED, NUM_REMOVED, NUM_UNKNOWN, WHY it ended, and
    NUM_WANTED: how many blocks the event has for which there is no room.
    """
    events, out_counts = wire.events_of(records), i64_of(bundle, COUNTS)
    query_waiting = u1_of(bundle, IS_WANTED)
    index, scratch, num_blocks = _index(bundle, u1_of(bundle, REPORTS)), _scratch(bundle), 0
    out_counts[:] = 0
    runs.tick(index.blocks.runs)
    for number in range(first, last):
        if num_blocks >= max_blocks or (num_blocks > 0 and query_waiting[0] != 0):
            return number
        record = _record_of(events, number)
        holder = _holder_of(bundle, max(0, record.words[wire.TIER]))
        if holder < 0 or not _is_plain(record.words, block_size):
            _stop(NEEDS_DECISION, len(record.engine_hashes), out_counts)
            return number
        if not _apply_record(index, record, holder, scratch, out_counts):
            return number
        num_blocks += len(record.engine_hashes)
    return last


@inlined
def _copy_words(data: Bytes, at: Index, out: U64) -> None:
    place = np.uint64(at)
    for i in range(len(out)):
        out[i] = load_u64(data, place)
        place += _8


@inlined
def _apply_packed(
    event: packed.PackedEvent,
    data: Bytes,
    index: _Index,
    bundle: U64,
    scratch: _Scratch,
    out_counts: I64,
) -> bool:
    """As _hold, for a packed event."""
    n, holder = event.num_blocks, _holder_of(bundle, event.tier)
    if event.kind < 0 or event.kind == wire.CLEARED or holder < 0:
        return _stop(NEEDS_DECISION, n, out_counts)
    if not _has_room(index, event.kind, holder, n, scratch, out_counts):
        return False
    engine_hashes, hashes = scratch.engine_hashes[:n], scratch.hashes[:n]
    _copy_words(data, event.engine_hashes, engine_hashes)
    if event.kind == wire.REMOVED:
        _count_removed(n, _drop(index, holder, engine_hashes, hashes), out_counts)
        return True
    parent = hash_of(index.space, event.parent) if event.has_parent else _0
    if event.has_parent and parent == _0:
        return _stop(NEEDS_DECISION, n, out_counts)
    _copy_words(data, event.hashes, hashes)
    at = scratch.at[:n]
    return _hold(index, holder, engine_hashes, hashes, at, parent, event.seed, out_counts)


@inlined
def _prefetch_words(slots: U64, data: Bytes, at: Index, num_words: Index) -> None:
    place, capacity = np.uint64(at), capacity_of(slots)
    for _ in range(min(NUM_PREFETCHED, num_words)):
        prefetch_key(slots, load_u64(data, place), capacity)
        place += _8


@inlined
def _prefetch_event(event: packed.PackedEvent, data: Bytes, index: _Index) -> None:
    """While one event is applied, prefetch what the next one begins with."""
    _prefetch_words(index.space.slots, data, event.engine_hashes, event.num_blocks)
    if event.kind == wire.STORED:
        _prefetch_words(index.blocks.table, data, event.hashes, event.num_blocks)


@inlined
def _start_of_events(data: Bytes, end: Index, out_counts: I64) -> Index:
    """Position of the first event; -1 if the payload has to be looked at first, as it has other
    events than plain ones, or none that can be read.
    """
    num_items, start = msgpack.array_header(data, 0)
    if num_items < 1 or start >= end or data[start] != packed.VERSION:
        _stop(NEEDS_CHECK, 0, out_counts)
        out_counts[POSITION] = -1
        return np.int64(-1)
    if not packed.is_whole(num_items, start + 1, data, end):
        _stop(NEEDS_CHECK, 0, out_counts)
        out_counts[POSITION] = start + 1
        return np.int64(-1)
    return np.int64(start + 1)


@inlined
def _apply_payload(
    first: Index, at: Index, end: Index, last: Index, max_blocks: Index, data: Bytes, bundle: U64,
    out_counts: I64,
) -> Index:  # fmt: skip
    index, scratch, num_blocks = _index(bundle, data[:0]), _scratch(bundle), np.int64(0)
    query_waiting = u1_of(bundle, IS_WANTED)
    runs.tick(index.blocks.runs)
    if at == 0:
        at = _start_of_events(data, end, out_counts)
        if at < 0:
            return first
    num_items, _ = msgpack.array_header(data, 0)
    last = min(last, num_items - 1)
    for number in range(first, last):
        out_counts[POSITION] = at
        if num_blocks >= max_blocks or (num_blocks > 0 and query_waiting[0] != 0):
            return number
        event = packed.read_event(data, at, end)
        out_counts[BEHIND] = event.end
        if number + 1 < last and event.end > 0:
            _prefetch_event(packed.read_plain(data, event.end, end), data, index)
        if not _apply_packed(event, data, index, bundle, scratch, out_counts):
            return number
        num_blocks += event.num_blocks
        at = event.end
    out_counts[POSITION] = at
    return last


@kernel(i8(i8, i8, i8, i8, i8, reads(u8)), releases_gil=True)
def apply_packed(first: int, at: int, end: int, last: int, max_blocks: int, bundle: U64) -> int:
    """Apply events number `first` to `last` of PAYLOAD[:end]; the first is at position `at`. With
    0 for `at`, nothing is done unless the whole payload has plain events only: WHY is NEEDS_CHECK
    then, and POSITION where the first event is. `last` may be above the number of events then.

    Behind the payload are PADDING more bytes, whatever they are. Ends early once `max_blocks`
    blocks are done, or after the event at hand when another thread has set IS_WANTED[0].

    Returns num_stored + (num_removed << REMOVED_SHIFT) if all events of the payload were applied
    and nothing else happened, else -1 - the number of the first event that was not applied; then
    COUNTS is as for apply_records, and has at POSITION where that event is, at BEHIND the next one.
    """
    data, out_counts = u1_of(bundle, PAYLOAD), i64_of(bundle, COUNTS)
    out_counts[:] = 0
    data[end : end + msgpack.PADDING] = 0
    number = _apply_payload(first, at, end, last, max_blocks, data, bundle, out_counts)
    is_plain = out_counts[WHY] == DONE and out_counts[NUM_UNKNOWN] == 0
    if is_plain and out_counts[POSITION] == end:
        return int(out_counts[NUM_STORED] + (out_counts[NUM_REMOVED] << REMOVED_SHIFT))
    return int(-1 - number)
