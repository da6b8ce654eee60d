"""Where the parts of packed events are in their bytes.

In:  a payload of kvplug/packed.py, PADDING more bytes behind it.   Out: an event at a position.

A valid payload in a form that nobody writes (numbers in more bytes than they need) is not read
here, but by kvplug/packed.py, which is the reference implementation of this file.
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
    are in the payload, num_blocks of each; end: where the next event is.
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
def _unread() -> PackedEvent:
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
        return _unread()
    seed, at = msgpack.natural(data, at)
    if at < 0 or at > end:
        return _unread()
    num_engine_hashes, engine_hashes, at = _read_words(data, at, end)
    if num_engine_hashes < 0:
        return _unread()
    num_hashes, hashes, at = _read_words(data, at, end)
    if num_hashes != num_engine_hashes:
        return _unread()
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
        return _unread()
    none = np.int64(0)
    return PackedEvent(np.int64(CLEARED), none, False, _0, _0, none, none, none, at + 2)


@inlined
def read_event(data: Bytes, at: Index, end: Index) -> PackedEvent:
    """The event at a position."""
    num_items, at = msgpack.array_header(data, at)
    if num_items < 2 or at + 2 > end:
        return _unread()
    if num_items == 2:
        return _read_cleared(data, at)
    if data[at + 1] > 2:
        return _unread()
    kind, tier = np.int64(data[at]), np.int64(data[at + 1])
    if kind == STORED and num_items == 6:
        return _read_stored(data, at + 2, end, tier)
    if kind == REMOVED and num_items == 3:
        num_engine_hashes, engine_hashes, at = _read_words(data, at + 2, end)
        if num_engine_hashes >= 0:
            return PackedEvent(
                kind, tier, False, _0, _0, engine_hashes, engine_hashes, num_engine_hashes, at
            )
    return _unread()


@inlined
def is_whole(num_items: Index, at: Index, data: Bytes, end: Index) -> bool:
    """Whether all events can be read here, and end where the payload ends. Asked before anything is
    done, so that a payload damaged further on changes nothing.
    """
    for _ in range(num_items - 1):
        event = read_event(data, at, end)
        if event.kind < 0:
            return False
        at = event.end
    return bool(at == end)
