"""What the cache of each rank will hold once it has served all that was routed to it.

In:  prompts in the order in which they were routed to a rank, its capacity.
Out: how many leading blocks of another prompt it will still hold when that one is served.

An engine with a queue evicts for the requests in it before it comes to a new one, so what it holds
now says little about what it will hold then: with queues of seconds and full caches, predictions
from residency alone were wrong by half. Engines evict the block used longest ago, and serve in
order; so this is that policy, over the prompts as they are routed.

A prompt is kept in chunks of CHUNK blocks by the hash of the first one:

    slots   hash of a chunk's first block xor the mark of the rank -> node + 1
    keys    of each node                                                     uint64
    links   of each node: its neighbours in order of use, its blocks         int32[3 * nodes]
    ends    first free node; then of each rank: its oldest node, its youngest, its blocks

Blocks that no later prompt can ask for in this form (a last chunk's, an answer's) have a node,
too, with key 0, and take their room. Reference: an OrderedDict per rank
(tests/kernels/test_forecast.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i4, i8, inlined, kernel, reads, u8, void, writes
from kvplug.kernels.holders import mark_of
from kvplug.kernels.table import (
    NUM_PREFETCHED,
    capacity_of,
    erase_slot,
    fill_slot,
    find_slot,
    has_room,
    prefetch_key,
    value_of,
)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Index = int | np.int64

CHUNK = 16
# links
BEFORE, AFTER, BLOCKS, LINK_WIDTH = 0, 1, 2, 3
NOBODY = -1
# ends
FREE, NUM_FREE, NUM_SHARED = 0, 1, 2
OLDEST, YOUNGEST, NUM_BLOCKS, END_WIDTH = 0, 1, 2, 3

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)


class Forecast(NamedTuple):
    """The arrays, as above."""

    slots: U64
    keys: U64
    links: I32
    ends: I64


@inlined
def _end(rank: Index, which: Index) -> Index:
    return NUM_SHARED + END_WIDTH * rank + which


@inlined
def _unlink(cache: Forecast, rank: Index, node: Index) -> None:
    before, after = cache.links[LINK_WIDTH * node + BEFORE], cache.links[LINK_WIDTH * node + AFTER]
    if before == NOBODY:
        cache.ends[_end(rank, OLDEST)] = after
    else:
        cache.links[LINK_WIDTH * before + AFTER] = after
    if after == NOBODY:
        cache.ends[_end(rank, YOUNGEST)] = before
    else:
        cache.links[LINK_WIDTH * after + BEFORE] = before


@inlined
def _link_youngest(cache: Forecast, rank: Index, node: Index) -> None:
    last = cache.ends[_end(rank, YOUNGEST)]
    cache.links[LINK_WIDTH * node + BEFORE] = last
    cache.links[LINK_WIDTH * node + AFTER] = NOBODY
    cache.ends[_end(rank, YOUNGEST)] = node
    if last == NOBODY:
        cache.ends[_end(rank, OLDEST)] = node
    else:
        cache.links[LINK_WIDTH * last + AFTER] = node


@inlined
def _take(cache: Forecast, rank: Index, key: np.uint64, num_blocks: Index) -> np.int64:
    """A free node, the rank's youngest now; there is one."""
    node = np.int64(cache.ends[FREE])
    cache.ends[FREE] = cache.links[LINK_WIDTH * node + AFTER]
    cache.ends[NUM_FREE] -= 1
    cache.keys[node], cache.links[LINK_WIDTH * node + BLOCKS] = key, num_blocks
    cache.ends[_end(rank, NUM_BLOCKS)] += num_blocks
    _link_youngest(cache, rank, node)
    return node


@inlined
def _drop_oldest(cache: Forecast, rank: Index) -> None:
    node = np.int64(cache.ends[_end(rank, OLDEST)])
    _unlink(cache, rank, node)
    at = find_slot(cache.slots, cache.keys[node], capacity_of(cache.slots))
    if cache.slots[_2 * at + _1] == np.uint64(node) + _1:  # not so for blocks without a key
        erase_slot(cache.slots, at, capacity_of(cache.slots))
    cache.ends[_end(rank, NUM_BLOCKS)] -= cache.links[LINK_WIDTH * node + BLOCKS]
    cache.links[LINK_WIDTH * node + AFTER] = np.int32(cache.ends[FREE])
    cache.ends[FREE] = node
    cache.ends[NUM_FREE] += 1


@inlined
def _use_chunk(cache: Forecast, rank: Index, key: np.uint64, num_blocks: Index) -> Index:
    """Make a chunk the youngest; returns by how many blocks that is more than there were."""
    at = find_slot(cache.slots, key, capacity_of(cache.slots))
    if cache.slots[_2 * at + _1] == _0:
        node = _take(cache, rank, key, num_blocks)
        fill_slot(cache.slots, at, key, np.uint64(node) + _1)
        return num_blocks
    node = np.int64(cache.slots[_2 * at + _1] - _1)
    more = np.int64(max(0, num_blocks - cache.links[LINK_WIDTH * node + BLOCKS]))
    cache.links[LINK_WIDTH * node + BLOCKS] += more
    cache.ends[_end(rank, NUM_BLOCKS)] += more
    _unlink(cache, rank, node)
    _link_youngest(cache, rank, node)
    return more


@inlined
def _prefetch_ahead(cache: Forecast, hashes: U64, chunk: Index, mark: np.uint64) -> None:
    """Prefetch the slots of chunks before this one."""
    last = num_chunks(len(hashes)) - 1
    first = max(0, chunk - NUM_PREFETCHED)
    for earlier in range(first, chunk + 1 if chunk == last else first + 1):
        prefetch_key(cache.slots, hashes[CHUNK * earlier] ^ mark, capacity_of(cache.slots))


@inlined
def _prefetch_after(cache: Forecast, node: Index) -> Index:
    """Prefetch the slot of a node; returns the node behind it."""
    prefetch_key(cache.slots, cache.keys[node], capacity_of(cache.slots))
    return np.int64(cache.links[LINK_WIDTH * node + AFTER])


@inlined
def _drop_to(cache: Forecast, rank: Index, capacity: Index) -> None:
    """Drop the oldest until the rank has no more blocks than that."""
    ahead: Index = np.int64(cache.ends[_end(rank, OLDEST)])
    num_ahead = 0
    while (
        cache.ends[_end(rank, NUM_BLOCKS)] > capacity and cache.ends[_end(rank, OLDEST)] != NOBODY
    ):
        while num_ahead < NUM_PREFETCHED and ahead != NOBODY:
            ahead = _prefetch_after(cache, ahead)
            num_ahead += 1
        _drop_oldest(cache, rank)
        num_ahead -= 1


@inlined
def num_chunks(num_blocks: Index) -> Index:
    """Into how many chunks a prompt falls."""
    return (num_blocks + CHUNK - 1) // CHUNK


@inlined
def can_use(cache: Forecast, num_blocks: Index) -> bool:
    """Whether there is room for a prompt of so many blocks."""
    needed = num_chunks(num_blocks) + 1
    return bool(cache.ends[NUM_FREE] >= needed and has_room(cache.slots, needed))


@inlined
def use(cache: Forecast, rank: Index, hashes: U64, num_new: Index, capacity: Index) -> None:
    """A prompt was routed to the rank, which will compute `num_new` blocks for it, its answer's
    among them. The beginning is used last, so that the end is the first to go. There is room.
    """
    mark, num_known = mark_of(rank), np.int64(0)
    for chunk in range(num_chunks(len(hashes)) - 1, -1, -1):
        _prefetch_ahead(cache, hashes, chunk, mark)
        num_blocks = min(CHUNK, len(hashes) - CHUNK * chunk)
        num_known += _use_chunk(cache, rank, hashes[CHUNK * chunk] ^ mark, num_blocks)
    if num_new > num_known:
        _take(cache, rank, _0, num_new - num_known)
    _drop_to(cache, rank, capacity)


@inlined
def _blocks_of(cache: Forecast, key: np.uint64) -> Index:
    """How many blocks the chunk has, 0 if it is not there."""
    found = value_of(cache.slots, key)
    if found == _0:
        return np.int64(0)
    return np.int64(cache.links[np.int64(LINK_WIDTH) * np.int64(found - _1) + BLOCKS])


@inlined
def num_held(cache: Forecast, rank: Index, hashes: U64) -> Index:
    """How many leading blocks the rank will hold."""
    mark, num_blocks = mark_of(rank), np.int64(len(hashes))
    for chunk in range(num_chunks(num_blocks)):
        there = _blocks_of(cache, hashes[CHUNK * chunk] ^ mark)
        if there < CHUNK:
            return min(num_blocks, CHUNK * chunk + there)
    return num_blocks


@inlined
def forget_rank(cache: Forecast, rank: Index) -> None:
    """The rank's cache is empty."""
    while cache.ends[_end(rank, OLDEST)] != NOBODY:
        _drop_oldest(cache, rank)


_ARRAYS = (writes(u8), writes(u8), writes(i4), writes(i8))


@kernel(void(i8, reads(u8), i8, i8, *_ARRAYS))
def use_prompt(
    rank: Index, hashes: U64, num_new: Index, capacity: Index,
    slots: U64, keys: U64, links: I32, ends: I64,
) -> None:  # fmt: skip
    """As `use`."""
    use(Forecast(slots, keys, links, ends), rank, hashes, num_new, capacity)


@kernel(i8(i8, reads(u8), *_ARRAYS))
def count_held(rank: Index, hashes: U64, slots: U64, keys: U64, links: I32, ends: I64) -> Index:
    """As `num_held`."""
    return num_held(Forecast(slots, keys, links, ends), rank, hashes)


@kernel(void(i8, *_ARRAYS))
def forget(rank: Index, slots: U64, keys: U64, links: I32, ends: I64) -> None:
    """As `forget_rank`."""
    forget_rank(Forecast(slots, keys, links, ends), rank)
