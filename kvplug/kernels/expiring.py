"""Blocks that expire: a ring of nodes in order of their deadlines, and a table that finds them.

In:  a rank number, sequence hashes, the time.   Out: ring and table changed, or depths moved on.

    table      key -> node + 1; key = sequence hash xor the mark of the rank
    keys       of each node                                            uint64
    deadlines  of each node, in seconds                                float64
    links      of each node: its rank, the nodes before and after it   int32[3 * nodes]
    state      FIRST, NEXT, NUM_USED, NUM_LOST, and from NUM_OF_RANK on the nodes of each rank

All nodes are linked in one circle: those in use from FIRST on, the free ones from NEXT on. A new
entry takes NEXT, the oldest gives FIRST back, a renewed one is linked in again before NEXT; so the
deadlines ascend, and each entry has one node however often it is renewed.

Whoever deletes a key from the table has ended the entry: its node expires later without effect.
The node of an entry in the table is in use and has its key. Reference:
tests/index/expiring_reference.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders
from kvplug.kernels._jit import f8, i8, inlined, kernel, prefetch, reads, u8, void, writes
from kvplug.kernels.bundle import f64_of, i32_of, i64_of, u64_of
from kvplug.kernels.table import (
    capacity_of,
    delete,
    erase_slot,
    fill_slot,
    find_slot,
    has_room,
    home_of,
    num_entries,
)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
Index = int | np.int64

# links
RANK, BEFORE, AFTER, LINK_WIDTH = 0, 1, 2, 3
NOBODY = -1
# state
FIRST, NEXT, NUM_USED, NUM_LOST, NUM_OF_RANK = 0, 1, 2, 3, 4

# The arrays of a bundle (kernels/bundle.py): the table's, then the ring's.
SLOTS, KEYS, DEADLINES, LINKS, STATE = range(5)

_NUM_PREFETCHED = 32  # a core has fewer loads under way at a time
_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)


class Ring(NamedTuple):
    """The nodes."""

    keys: U64
    deadlines: F64
    links: I32
    state: I64


@inlined
def ring_of(bundle: U64) -> Ring:
    """The nodes of a bundle."""
    return Ring(
        u64_of(bundle, KEYS), f64_of(bundle, DEADLINES), i32_of(bundle, LINKS),
        i64_of(bundle, STATE),
    )  # fmt: skip


@inlined
def extend(
    slots: U64, deadlines: F64, state: I64, now_s: float, hashes: U64, out_depths: I64
) -> None:
    """Move out_depths[rank] forward over the rank's entries that are not overdue."""
    capacity = capacity_of(slots)
    for rank in range(min(len(out_depths), len(state) - NUM_OF_RANK)):
        if state[NUM_OF_RANK + rank] == 0:
            continue
        marked, end = holders.mark_of(rank), out_depths[rank]
        while end < len(hashes):
            at = find_slot(slots, hashes[end] ^ marked, capacity)
            value = slots[_2 * at + _1]
            if value == _0 or deadlines[value - _1] <= now_s:
                break
            end += 1
        out_depths[rank] = end


@inlined
def _link(links: I32, node: Index, following: Index) -> None:
    links[LINK_WIDTH * node + AFTER] = following
    links[LINK_WIDTH * following + BEFORE] = node


@inlined
def _release_first(slots: U64, ring: Ring) -> bool:
    """Free the oldest node; whether it had an entry, which is gone then."""
    links, state = ring.links, ring.state
    node, capacity = state[FIRST], capacity_of(slots)
    at = find_slot(slots, ring.keys[node], capacity)
    is_current = bool(slots[_2 * at + _1] == np.uint64(node) + _1)
    if is_current:
        erase_slot(slots, at, capacity)
    rank = links[LINK_WIDTH * node + RANK]
    if rank != NOBODY:
        state[NUM_OF_RANK + rank] -= 1
    state[FIRST] = links[LINK_WIDTH * node + AFTER]
    state[NUM_USED] -= 1
    return is_current


@inlined
def _prefetch_oldest(slots: U64, ring: Ring, now_s: float, max_entries: Index) -> Index:
    """Prefetch the entries of the oldest nodes; returns how many are due."""
    node, capacity = np.int64(ring.state[FIRST]), capacity_of(slots)
    num_due = 0
    while num_due < max_entries and ring.deadlines[node] <= now_s:
        prefetch(slots, _2 * home_of(ring.keys[node], capacity))
        node = np.int64(ring.links[LINK_WIDTH * node + AFTER])
        num_due += 1
    return num_due


@inlined
def _expire(slots: U64, ring: Ring, now_s: float, max_entries: Index) -> None:
    left = min(max_entries, ring.state[NUM_USED])
    while left > 0:
        num_due = _prefetch_oldest(slots, ring, now_s, min(left, _NUM_PREFETCHED))
        for _ in range(num_due):
            _release_first(slots, ring)
        left = left - _NUM_PREFETCHED if num_due == _NUM_PREFETCHED else 0


@inlined
def _take(ring: Ring, rank: Index, key: np.uint64) -> np.int64:
    """A free node for an entry; there is one."""
    links, state = ring.links, ring.state
    node = state[NEXT]
    state[NEXT] = links[LINK_WIDTH * node + AFTER]
    state[NUM_USED] += 1
    state[NUM_OF_RANK + rank] += 1
    ring.keys[node], links[LINK_WIDTH * node + RANK] = key, rank
    return np.int64(node)


@inlined
def _move_to_end(ring: Ring, node: Index) -> None:
    """Make a node in use the youngest of them."""
    links, state = ring.links, ring.state
    last, after = links[LINK_WIDTH * state[NEXT] + BEFORE], links[LINK_WIDTH * node + AFTER]
    if node == last:
        return
    if node == state[FIRST]:
        state[FIRST] = after
    if node == state[NEXT]:  # no node is free, and the oldest comes right behind the youngest
        state[NEXT] = after
        return
    _link(links, links[LINK_WIDTH * node + BEFORE], after)
    _link(links, last, node)
    _link(links, node, state[NEXT])


@inlined
def can_insert(slots: U64, ring: Ring, rank: Index, num_blocks: Index, capacity: Index) -> bool:
    """Whether arrays have room for a rank's blocks; of more than `capacity` the first ones."""
    num_nodes, num_more = np.int64(len(ring.keys)), min(num_blocks, capacity)
    fits = min(ring.state[NUM_USED] + num_more, capacity) <= num_nodes
    num_entered = min(num_more, capacity - np.int64(num_entries(slots)))
    fits = fits and has_room(slots, max(0, num_entered))
    return bool(fits and NUM_OF_RANK + rank < len(ring.state))


@inlined
def num_free(ring: Ring) -> Index:
    """How many nodes have no entry."""
    return np.int64(len(ring.keys)) - np.int64(ring.state[NUM_USED])


@inlined
def insert_blocks(
    slots: U64, ring: Ring, rank: Index, now_s: float, ttl_s: float, max_expired: Index, hashes: U64
) -> None:
    """Enter or renew a rank's blocks, the last ones first, so that they are the first to go.

    At most max_expired overdue entries are dropped first; that is at least len(hashes) unless so
    many nodes are free, so those that make room later are lost before their time. There is room,
    and at least as many nodes as hashes. A clock that goes back does not shorten lives: deadlines
    ascend.
    """
    state, links, num_nodes = ring.state, ring.links, len(ring.keys)
    deadline_s = now_s + ttl_s
    if state[NUM_USED] > 0:
        youngest = np.int64(links[LINK_WIDTH * state[NEXT] + BEFORE])
        deadline_s = max(deadline_s, ring.deadlines[youngest])
    marked, capacity = holders.mark_of(rank), capacity_of(slots)
    _expire(slots, ring, now_s, max_expired)
    for i in range(max(0, len(hashes) - _NUM_PREFETCHED), len(hashes)):
        prefetch(slots, _2 * home_of(hashes[i] ^ marked, capacity))
    for i in range(len(hashes) - 1, -1, -1):
        if i >= _NUM_PREFETCHED:
            prefetch(slots, _2 * home_of(hashes[i - _NUM_PREFETCHED] ^ marked, capacity))
        key = hashes[i] ^ marked
        at = find_slot(slots, key, capacity)
        if slots[_2 * at + _1] != _0:
            node = np.int64(slots[_2 * at + _1] - _1)
            _move_to_end(ring, node)
        else:
            if state[NUM_USED] == num_nodes:
                state[NUM_LOST] += _release_first(slots, ring)
                at = find_slot(slots, key, capacity)
            node = _take(ring, rank, key)
            fill_slot(slots, at, key, np.uint64(node) + _1)
        ring.deadlines[node] = deadline_s


@kernel(void(i8, f8, f8, i8, reads(u8), reads(u8)))
def insert(
    rank: Index, now_s: float, ttl_s: float, max_expired: Index, hashes: U64, bundle: U64
) -> None:
    """As insert_blocks."""
    slots = u64_of(bundle, SLOTS)
    insert_blocks(slots, ring_of(bundle), rank, now_s, ttl_s, max_expired, hashes)


@kernel(void(f8, i8, reads(u8)))
def expire(now_s: float, max_entries: Index, bundle: U64) -> None:
    """Drop the overdue entries, at most so many."""
    _expire(u64_of(bundle, SLOTS), ring_of(bundle), now_s, max_entries)


@kernel(void(i8, reads(u8), writes(u8)))
def confirm(rank: Index, hashes: U64, slots: U64) -> None:
    """End the rank's entries of these blocks; their nodes expire later, without effect."""
    marked, capacity = holders.mark_of(rank), capacity_of(slots)
    for i in range(len(hashes)):
        if i + _NUM_PREFETCHED < len(hashes):
            prefetch(slots, _2 * home_of(hashes[i + _NUM_PREFETCHED] ^ marked, capacity))
        delete(slots, hashes[i] ^ marked)


@kernel(void(i8, reads(u8)))
def forget(rank: Index, bundle: U64) -> None:
    """End all entries of a rank; its nodes are nobody's until they expire."""
    slots, ring = u64_of(bundle, SLOTS), ring_of(bundle)
    links, state = ring.links, ring.state
    node = state[FIRST]
    for _ in range(state[NUM_USED]):
        if state[NUM_OF_RANK + rank] == 0:
            return
        if links[LINK_WIDTH * node + RANK] == rank:
            # The key is this rank's alone: what it finds, if anything, is an entry of the rank.
            delete(slots, ring.keys[node])
            links[LINK_WIDTH * node + RANK] = NOBODY
            state[NUM_OF_RANK + rank] -= 1
        node = np.int64(links[LINK_WIDTH * node + AFTER])


@kernel(void(f8, reads(u8), reads(u8), writes(i8)))
def extend_depths(now_s: float, hashes: U64, bundle: U64, out_depths: I64) -> None:
    """As `extend`."""
    ring = ring_of(bundle)
    extend(u64_of(bundle, SLOTS), ring.deadlines, ring.state, now_s, hashes, out_depths)


@kernel(u8(i8))
def mark_of(rank: Index) -> np.uint64:
    """What the keys of a rank's entries are marked with."""
    return holders.mark_of(rank)
