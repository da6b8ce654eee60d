"""The items of a large JSON object or array, found without making Python objects of them.

In:  the bytes of an object or array.   Out: where each of its items begins and ends.

Only brackets, strings and separators are looked at (RFC 8259, section 2): who reads an item finds
out what is wrong inside. Reference: tests/kernels/references.py.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u1, writes

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

INCOMPLETE: Final = -1
WORDS_PER_ITEM: Final = 3

_QUOTE, _BACKSLASH = np.uint8(ord('"')), np.uint8(ord("\\"))
_COMMA, _COLON = np.uint8(ord(",")), np.uint8(ord(":"))
_OPEN_ARRAY, _CLOSE_ARRAY = np.uint8(ord("[")), np.uint8(ord("]"))
_OPEN_OBJECT, _CLOSE_OBJECT = np.uint8(ord("{")), np.uint8(ord("}"))
_SPACE = np.uint8(ord(" "))  # the greatest of the four bytes of white space


@inlined
def _opens(byte: np.uint8) -> bool:
    return byte in (_OPEN_ARRAY, _OPEN_OBJECT)


@inlined
def _closes(byte: np.uint8) -> bool:
    return byte in (_CLOSE_ARRAY, _CLOSE_OBJECT)


@inlined
def _separates(byte: np.uint8) -> bool:
    return byte in (_COMMA, _COLON)


@inlined
def _is_blank(text: U8, begin: int, end: int) -> bool:
    while begin < end and text[begin] <= _SPACE:
        begin += 1
    return begin == end


@inlined
def _end_of_string(text: U8, at: int) -> int:
    """Behind the quote that ends the string at `at`, or the end of the text."""
    at += 1
    while at < len(text) and text[at] != _QUOTE:
        at += 2 if text[at] == _BACKSLASH else 1
    return min(at + 1, len(text))


@inlined
def _walk_item(text: U8, at: int, out_items: I64, word: int) -> int:
    """Note the item that begins at `at`; gives where the separator or bracket behind it is."""
    begin, depth, num_separators = at, 0, 0
    while at < len(text):
        byte = text[at]
        if depth == 0 and (_separates(byte) or _closes(byte)):
            break
        depth += int(_opens(byte)) - int(_closes(byte))
        num_separators += int(_separates(byte))
        at = _end_of_string(text, at) if byte == _QUOTE else at + 1
    out_items[word], out_items[word + 1], out_items[word + 2] = begin, at, num_separators
    return at


@kernel(i8(reads(u1), writes(i8)), releases_gil=True)
def find_items(text: U8, out_items: I64) -> int:
    """The first items of the object or array whose bracket is text[0]; of an object, names and
    values in turn. Gives how many, or INCOMPLETE if the text ends before the closing bracket.

    out_items[3 i : 3 i + 3]: where item i begins and where it ends, white space included, and how
    many separators are within it, those in strings left out. No further item is read than there is
    room for.
    """
    at = 1
    for count in range(len(out_items) // WORDS_PER_ITEM):
        begin, at = at, _walk_item(text, at, out_items, count * WORDS_PER_ITEM)
        if at >= len(text):
            return INCOMPLETE
        if _closes(text[at]):
            return 0 if count == 0 and _is_blank(text, begin, at) else count + 1
        at += 1
    return len(out_items) // WORDS_PER_ITEM
