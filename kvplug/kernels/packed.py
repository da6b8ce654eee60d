"""Where the parts of packed events are in their bytes.

In:  a payload of kvplug/packed.py, PADDING more bytes behind it.   Out: an event at a position.

Read here are plain stores, removals and clears. What else there is (details, copies, transitions,
adapters) is passed over, for kvplug/packed.py, which is the reference implementation of this file.
So is a valid payload in a form that nobody writes (numbers in more bytes than they need).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import msgpack
from kvplug.kernels._jit import inlined
from kvplug.kernels.wire import CLEARED, REMOVED, STORED

Bytes = npt.NDArray[np.uint8]
Index = int | np.int64

VERSION = 2  # kvplug/packed.py
_0 = np.uint64(0)
_NIL = 0xC0


class PackedEvent(NamedTuple):
    """kind: STORED, REMOVED, CLEARED, or -1: not read here. engine_hashes and hashes: where they
    are in the payload, num_blocks of each; end: where the next event is, -1 if that is not known.
    """

    kind: Index
    tier: Index
    has_parent: bool
    parent: np.uint64
    seed: np.uint64
    engine_hashes: Index
    hashes: Index
    num_blocks: Index
    end: Index


@inlined
def _unread(data: Bytes, at: Index, end: Index) -> PackedEvent:
    """The event at a position is none for here."""
    none = np.int64(0)
    behind = msgpack.after_item(data, at, end)
    return PackedEvent(np.int64(-1), none, False, _0, _0, none, none, none, behind)


@inlined
def _failed() -> PackedEvent:
    none = np.int64(0)
    return PackedEvent(np.int64(-1), none, False, _0, _0, none, none, none, none)


@inlined
def _read_words(data: Bytes, at: Index, end: Index) -> tuple[Index, Index, Index]:
    """(number of u64, position of the first, position behind them); -1 if there are none."""
    num_bytes, at = msgpack.bytes_header(data, at)
    if num_bytes < 0 or num_bytes % 8 != 0 or at + num_bytes > end:
        return msgpack.FAILED, at, at
    return num_bytes // 8, at, at + num_bytes


@inlined
def _read_stored(data: Bytes, at: Index, end: Index, tier: Index) -> PackedEvent:
    has_parent, parent = data[at] != _NIL, _0
    if has_parent:
        parent, at = msgpack.natural(data, at)
    else:
        at += 1
    if at < 0 or at > end:
        return _failed()
    seed, at = msgpack.natural(data, at)
    if at < 0 or at > end:
        return _failed()
    num_engine_hashes, engine_hashes, at = _read_words(data, at, end)
    if num_engine_hashes < 0:
        return _failed()
    num_hashes, hashes, at = _read_words(data, at, end)
    if num_hashes != num_engine_hashes:
        return _failed()
    return PackedEvent(
        np.int64(STORED),
        tier,
        has_parent,
        parent,
        seed,
        engine_hashes,
        hashes,
        num_engine_hashes,
        at,
    )


@inlined
def _read_cleared(data: Bytes, at: Index) -> PackedEvent:
    is_cleared = data[at] == CLEARED and (data[at + 1] <= 2 or data[at + 1] == _NIL)
    if not is_cleared:
        return _failed()
    none = np.int64(0)
    return PackedEvent(np.int64(CLEARED), none, False, _0, _0, none, none, none, at + 2)


@inlined
def read_plain(data: Bytes, at: Index, end: Index) -> PackedEvent:
    """The event at a position; of one that is not plain, only that it is not."""
    num_items, at = msgpack.array_header(data, at)
    if num_items < 2 or at + 2 > end:
        return _failed()
    if num_items == 2:
        return _read_cleared(data, at)
    if data[at + 1] > 2:
        return _failed()
    kind, tier = np.int64(data[at]), np.int64(data[at + 1])
    if kind == STORED and num_items == 6:
        return _read_stored(data, at + 2, end, tier)
    if kind == REMOVED and num_items == 3:
        num_engine_hashes, engine_hashes, at = _read_words(data, at + 2, end)
        if num_engine_hashes >= 0:
            return PackedEvent(
                kind, tier, False, _0, _0, engine_hashes, engine_hashes, num_engine_hashes, at
            )
    return _failed()


@inlined
def read_event(data: Bytes, at: Index, end: Index) -> PackedEvent:
    """The event at a position, and where the next one is."""
    event = read_plain(data, at, end)
    return event if event.kind >= 0 else _unread(data, at, end)


@inlined
def is_whole(num_items: Index, at: Index, data: Bytes, end: Index) -> bool:
    """Whether all events can be read here, and end where the payload ends. Asked before anything is
    done, so that a payload damaged further on changes nothing.
    """
    for _ in range(num_items - 1):
        event = read_plain(data, at, end)
        if event.kind < 0:
            return False
        at = event.end
    return bool(at == end)
