"""Items of msgpack in a flat array of bytes, as far as event messages have them.

In:  `data`, uint8[n], the position of an item, and `end`, where the payload ends.
Out: what the item is, and the position behind it.

Positions are int64, and -1 means "not read here". An item may be read past `end` before that is
noticed, by at most PADDING bytes: the caller provides them. Loops have unsigned positions: signed
ones are tested for wrap-around at every access. Reference: msgspec (tests/kernels/test_wire.py).

The format is https://github.com/msgpack/msgpack/blob/master/spec.md (version 5).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import inlined

Bytes = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

PADDING = 64
FAILED = np.int64(-1)


def packed(words: tuple[bytes, ...]) -> Bytes:
    """Rows of 32 bytes: the length, then the word."""
    rows = [bytes([len(word)]) + word.ljust(31, b"\0") for word in words]
    return np.frombuffer(b"".join(rows), dtype=np.uint8).copy()


# Token ids without branches: by first byte, how many bytes the integer has in all (0: none that is
# read here), how far the four bytes behind the first are to be shifted, and the value in the first.
_STEP = np.zeros(256, dtype=np.uint64)
_STEP[:0x80], _STEP[0xCC], _STEP[0xCD], _STEP[0xCE] = 1, 2, 3, 5
_SHIFT = np.full(256, 32, dtype=np.uint64)
_SHIFT[0xCC], _SHIFT[0xCD], _SHIFT[0xCE] = 24, 16, 0
_INLINE = np.zeros(256, dtype=np.uint64)
_INLINE[:0x80] = np.arange(0x80)

# Any item, by its first byte: its bytes but for what a length says and for items in it (0: none
# that is passed over here), how many bytes a length has, how many items are in it, and how many
# more for each unit of its length (0: those are bytes).
_NUM_BYTES = np.ones(256, dtype=np.int64)
_LENGTH_WIDTH, _NUM_ITEMS, _ITEMS_OF_LENGTH = (np.zeros(256, dtype=np.int64) for _ in range(3))
_NUM_BYTES[0xC1], _NUM_BYTES[0xC7:0xCA], _NUM_BYTES[0xD4:0xD9] = 0, 0, 0
_NUM_BYTES[0xA0:0xC0] = np.arange(1, 33)
_NUM_BYTES[0xCA:0xCC] = 5, 9
_NUM_BYTES[0xCC:0xD4] = 2, 3, 5, 9, 2, 3, 5, 9
_NUM_ITEMS[0x80:0x90], _NUM_ITEMS[0x90:0xA0] = np.arange(0, 32, 2), np.arange(16)
for _first, _widths in ((0xC4, (1, 2, 4)), (0xD9, (1, 2, 4)), (0xDC, (2, 4)), (0xDE, (2, 4))):
    _LENGTH_WIDTH[_first : _first + len(_widths)] = _widths
    _NUM_BYTES[_first : _first + len(_widths)] = 1 + np.array(_widths)
_ITEMS_OF_LENGTH[0xDC:0xDE], _ITEMS_OF_LENGTH[0xDE:0xE0] = 1, 2

_0, _1, _2, _3, _4 = (np.uint64(n) for n in range(5))
_8, _16, _24, _32 = np.uint64(8), np.uint64(16), np.uint64(24), np.uint64(32)


@inlined
def _four_bytes(data: Bytes, at: np.uint64) -> np.uint64:
    # An unsigned position: signed ones are tested for wrap-around at every access.
    high = (np.uint64(data[at]) << _24) | (np.uint64(data[at + _1]) << _16)
    return high | (np.uint64(data[at + _2]) << _8) | np.uint64(data[at + _3])


@inlined
def _big_endian(data: Bytes, at: Index, num_bytes: Index) -> np.uint64:
    value, here = _0, np.uint64(at)
    until = here + np.uint64(num_bytes)
    while here < until:
        value = (value << _8) | np.uint64(data[here])
        here += _1
    return value


@inlined
def array_header(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(number of items, position of the first), or (-1, at)."""
    first = data[at]
    if 0x90 <= first <= 0x9F:
        return np.int64(first & 0x0F), at + 1
    if first == 0xDC:
        return np.int64(_big_endian(data, at + 1, 2)), at + 3
    if first == 0xDD:
        return np.int64(_big_endian(data, at + 1, 4)), at + 5
    return FAILED, at


@inlined
def map_header(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(number of fields, position of the first key), or (-1, at)."""
    first = data[at]
    if 0x80 <= first <= 0x8F:
        return np.int64(first & 0x0F), at + 1
    if first == 0xDE:
        return np.int64(_big_endian(data, at + 1, 2)), at + 3
    return FAILED, at


@inlined
def _string_header(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(number of bytes, position of the first), or (-1, at)."""
    first = data[at]
    if 0xA0 <= first <= 0xBF:
        return np.int64(first & 0x1F), at + 1
    if first == 0xD9:
        return np.int64(data[at + 1]), at + 2
    return FAILED, at


@inlined
def bytes_header(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(number of bytes, position of the first) of a byte string, or (-1, at)."""
    first = data[at]
    if first == 0xC4:
        return np.int64(data[at + 1]), at + 2
    if first == 0xC5:
        return np.int64(_big_endian(data, at + 1, 2)), at + 3
    if first == 0xC6:
        return np.int64(_big_endian(data, at + 1, 4)), at + 5
    return FAILED, at


@inlined
def natural(data: Bytes, at: Index) -> tuple[np.uint64, Index]:
    """(an integer >= 0, position behind it); position -1 if it is none."""
    first = data[at]
    if first < 0x80:
        return np.uint64(first), at + 1
    if first == 0xCE:
        return _big_endian(data, at + 1, 4), at + 5
    if first == 0xCD:
        return _big_endian(data, at + 1, 2), at + 3
    if first == 0xCC:
        return np.uint64(data[at + 1]), at + 2
    if first == 0xCF:
        return _big_endian(data, at + 1, 8), at + 9
    return np.uint64(0), FAILED


@inlined
def integer(data: Bytes, at: Index) -> tuple[np.uint64, Index]:
    """As `natural`, and negative ones modulo 2**64 (SGLang's hashes are signed)."""
    first = data[at]
    if first >= 0xE0:
        return np.uint64(np.int64(first) - 256), at + 1
    if 0xD0 <= first <= 0xD3:
        num_bytes = np.int64(1) << np.int64(first - 0xD0)
        value, bits = _big_endian(data, at + 1, num_bytes), np.uint64(8 * num_bytes)
        if bits < np.uint64(64) and (value >> (bits - np.uint64(1))) != np.uint64(0):
            value |= ~np.uint64(0) << bits
        return value, at + 1 + num_bytes
    return natural(data, at)


@inlined
def _is_word(data: Bytes, at: Index, length: Index, words: Bytes, row: Index) -> bool:
    here, there = np.uint64(at), np.uint64(32 * row)
    if words[there] != length:
        return False
    until = here + np.uint64(length)
    while here < until:
        there += _1
        if data[here] != words[there]:
            return False
        here += _1
    return True


@inlined
def _is_ascii(data: Bytes, start: Index, length: Index) -> bool:
    highest = np.uint8(0)
    for i in range(length):
        highest |= data[start + i]
    return bool(highest <= 0x7F)


@inlined
def word(data: Bytes, at: Index, words: Bytes, guess: Index) -> tuple[Index, Index]:
    """(which of the words the string at `at` is, position behind it).

    Number of words: none of them. -1: no string, a long one, or one that is not of ASCII, which may
    be no text at all. Engines name their fields in a fixed order, so the one after the last is
    tried first.
    """
    length, start = _string_header(data, at)
    num_words = len(words) // 32
    if length < 0 or length > 31:
        return FAILED, at
    if guess < num_words and _is_word(data, start, length, words, guess):
        return guess, start + length
    for row in range(num_words):
        if _is_word(data, start, length, words, row):
            return row, start + length
    return (num_words, start + length) if _is_ascii(data, start, length) else (FAILED, at)


@inlined
def after_scalar(data: Bytes, at: Index, end: Index) -> Index:
    """Behind nil, a bool, a number, or a string of ASCII; -1 for anything else."""
    first = data[at]
    if first <= 0x7F or first >= 0xE0 or first == 0xC0 or first == 0xC2 or first == 0xC3:
        return at + 1
    if first == 0xCA or first == 0xCB:
        return at + (5 if first == 0xCA else 9)
    if 0xCC <= first <= 0xD3:
        return at + 1 + (np.int64(1) << np.int64((first - 0xCC) & 3))
    length, start = _string_header(data, at)
    if length < 0 or start + length > end or not _is_ascii(data, start, length):
        return FAILED
    return start + length


@inlined
def after_nil(data: Bytes, at: Index) -> Index:
    """Behind nil."""
    return at + 1 if data[at] == 0xC0 else FAILED


@inlined
def after_nils(data: Bytes, at: Index, end: Index) -> Index:
    """Behind nil, or an array of nils and empty arrays: keys that no block has."""
    if data[at] == 0xC0:
        return at + 1
    num_items, at = array_header(data, at)
    if num_items < 0 or at + num_items > end:
        return FAILED
    for i in range(num_items):
        if data[at + i] != 0xC0 and data[at + i] != 0x90:
            return FAILED
    return at + num_items


@inlined
def read_engine_hashes(
    data: Bytes, at: Index, end: Index, out: U64, first: Index
) -> tuple[Index, Index]:
    """(number of hashes, position behind them)."""
    num_items, at = array_header(data, at)
    if num_items < 0 or at + num_items > end:
        return FAILED, FAILED
    for i in range(num_items):
        value, at = integer(data, at)
        if at < 0 or at > end:
            return FAILED, FAILED
        out[first + i] = value
    return num_items, at


@inlined
def read_tokens(data: Bytes, at: Index, end: Index, out: U32, first: Index) -> tuple[Index, Index]:
    """(number of token ids, position behind them)."""
    num_items, at = array_header(data, at)
    if num_items < 0 or at + num_items > end:
        return FAILED, FAILED
    place, stop = np.uint64(at), np.uint64(end)
    to, until = np.uint64(first), np.uint64(first + num_items)
    while to < until and place < stop:
        head = np.uint64(data[place])
        step = _STEP[head]
        if step == _0:
            return FAILED, FAILED
        out[to] = _INLINE[head] | (_four_bytes(data, place + _1) >> _SHIFT[head])
        place += step
        to += _1
    return (num_items, np.int64(place)) if to == until else (FAILED, FAILED)


@inlined
def read_small(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(an integer in [0, 2**31), position behind it)."""
    value, at = natural(data, at)
    if at < 0 or (value >> np.uint64(31)) != np.uint64(0):
        return FAILED, FAILED
    return np.int64(value), at


@inlined
def _extent(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(bytes of an item but for those in it, items in it); 0 bytes if it is none."""
    first = data[at]
    num_bytes, num_items = np.int64(_NUM_BYTES[first]), np.int64(_NUM_ITEMS[first])
    width = np.int64(_LENGTH_WIDTH[first])
    if width > 0:
        length = np.int64(_big_endian(data, at + 1, width))
        items_of_length = np.int64(_ITEMS_OF_LENGTH[first])
        num_items += length * items_of_length
        num_bytes += length if items_of_length == 0 else 0
    return num_bytes, num_items


@inlined
def after_item(data: Bytes, at: Index, end: Index) -> Index:
    """Behind one item of any kind, with all that is in it; no extension types."""
    num_left = np.int64(1)
    while num_left > 0:
        if at >= end:
            return FAILED
        num_bytes, num_items = _extent(data, at)
        if num_bytes < 1 or num_items > end - at or num_bytes > end - at:
            return FAILED
        at, num_left = at + num_bytes, num_left - 1 + num_items
    return np.int64(at)
