"""Texts to token ids, piece by piece: a piece that was seen before is not tokenized again.

In:  a tokenizer, texts.   Out: uint32 token ids, equal to those of the text as a whole.

Requests that share a prefix share its pieces, so tokenizing costs what is new in a request: of a
conversation's next turn, the turn. A text is cut into large pieces, and those that are not known
into small ones: few have to be looked up, and little of a shared prefix is tokenized with what
follows it. A piece ends at the first place behind its size at which cuts.py may cut; with a
tokenizer that has no such places texts are not cut.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from kvplug.tokenization.cuts import cut_pattern
from kvplug.tokenization.text_encoder import U32, text_encoder

_PIECES_PER_LARGE: Final = 16
_FEW_CHARS: Final = 2000
# Of a piece, beside its text and its ids: headers, and a place in the dict (CPython 3.11).
_ENTRY_BYTES: Final = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How much is remembered, and when that is enough.

    max_bytes:    of all pieces together.
    piece_chars:  the length of a small piece.
    min_overlap:  from this share of a text on, its known beginning stands for the whole text and
                  the rest is not tokenized; 1.0: never.
    """

    max_bytes: int = 64 * 2**20
    piece_chars: int = 256
    min_overlap: float = 1.0


@dataclass(slots=True)
class StoreCounts:
    """How much of the texts was known; all counts only grow."""

    num_texts: int = 0
    num_chars: int = 0
    num_chars_known: int = 0
    num_texts_shortened: int = 0


@dataclass(slots=True)
class _Found:
    """A text in parts: token ids where they are known, else the text; large ones that are not
    known, with their parts; how many characters are known, and how many from the beginning on.
    """

    parts: list[str | U32]
    unknown: list[tuple[str, slice]]
    num_known: int = 0
    num_leading: int = 0
    leading_parts: int = 0

    def add(self, text: str, ids: U32 | None) -> None:
        is_leading = self.leading_parts == len(self.parts)
        self.parts.append(text if ids is None else ids)
        if ids is not None:
            self.num_known += len(text)
            if is_leading:
                self.num_leading += len(text)
                self.leading_parts += 1


class PieceEncoder:
    """encode a text. `cuts`: whether pieces are kept; `library`: what tokenizes. Thread-safe."""

    def __init__(
        self, backend: Tokenizer, *, written: str = "", options: StoreOptions | None = None
    ) -> None:
        """The tokenizer must not change from now on; `written`: the templates of the model."""
        self._tokenize, self.library = text_encoder(backend)
        leading = _leading_special_ids(backend)
        self._cut_at = None if leading is None else cut_pattern(backend, written)
        self.cuts = self._cut_at is not None
        self._leading: U32 = np.array(leading or [], dtype=np.uint32)
        self._options = options or StoreOptions()
        # fastokens takes less time for a large piece than small ones take to be looked up.
        self._is_fast = self.library == "fastokens"
        self._large_chars = self._options.piece_chars * _PIECES_PER_LARGE
        self._pieces = _Pieces(self._options.max_bytes)
        self.counts = StoreCounts()

    @property
    def num_bytes(self) -> int:
        """What the pieces take now."""
        return self._pieces.num_bytes

    def encode(self, text: str, *, with_special: bool, max_new: int) -> U32 | None:
        """Token ids of a text; what the tokenizer raises for one that has none.

        None if more than `max_new` characters would have to be tokenized.
        """
        if self._cut_at is None:
            if len(text) > max_new:
                return None
            self._count(len(text), 0)
            return self._tokenize([text], with_special=with_special)[0]
        found = self._look_up(text, self._cut_at, max_new)
        if found is None:
            return None
        self._count(len(text), found.num_known)
        new = [part for part in found.parts if isinstance(part, str)]
        made = iter(self._tokenize(new, with_special=False) if new else [])
        ids = [next(made) if isinstance(part, str) else part for part in found.parts]
        self._keep(found, ids)
        return np.concatenate([self._special(with_special), *ids])

    def beginning(self, text: str, *, with_special: bool) -> U32 | None:
        """Token ids of the known beginning of a text, where it may stand for all of it."""
        if self._options.min_overlap == 1 or self._cut_at is None:
            return None
        found = self._look_up(text, self._cut_at, len(text))
        if found is None or found.num_leading < self._options.min_overlap * len(text):
            return None
        self._count(len(text), found.num_known)
        self.counts.num_texts_shortened += 1
        known = [it for it in found.parts[: found.leading_parts] if not isinstance(it, str)]
        return np.concatenate([self._special(with_special), *known])

    def last_cut(self, text: str, end: int) -> int:
        """The last place, at `end` or before, at which the text may be cut; 0 if there is none."""
        if self._cut_at is None:
            return 0
        for start in (max(0, end - _FEW_CHARS), 0):
            places = (place.start() for place in self._cut_at.finditer(text, start))
            found = max(itertools.takewhile(lambda place: place <= end, places), default=0)
            if found:
                return found
        return 0

    def _special(self, with_special: bool) -> U32:
        return self._leading if with_special else self._leading[:0]

    def _look_up(self, text: str, cut_at: re.Pattern[str], max_new: int) -> _Found | None:
        """None as soon as too much is not known."""
        found = _Found([], [])
        num_seen = 0
        for piece in _cut(text, self._large_chars, cut_at):
            num_seen += len(piece)
            ids = self._pieces.find(piece)
            if ids is not None:
                found.add(piece, ids)
                continue
            begin = len(found.parts)
            if self._is_fast:
                found.add(piece, None)
            else:
                for small in _cut(piece, self._options.piece_chars, cut_at):
                    found.add(small, self._pieces.find(small))
            if num_seen - found.num_known > max_new:
                return None
            if len(piece) >= self._large_chars:  # else it is the end of one text
                found.unknown.append((piece, slice(begin, len(found.parts))))
        return found

    def _keep(self, found: _Found, ids: list[U32]) -> None:
        for part, its in zip(found.parts, ids, strict=True):
            if isinstance(part, str):
                self._pieces.keep(part, its)
        for piece, where in found.unknown:
            self._pieces.keep(piece, np.concatenate(ids[where]))

    def _count(self, num_chars: int, num_known: int) -> None:
        # Without a lock: two threads may lose a count, which no decision depends on.
        self.counts.num_texts += 1
        self.counts.num_chars += num_chars
        self.counts.num_chars_known += num_known


class _Pieces:
    """Token ids by piece, within a number of bytes; the one used longest ago goes first.

    Locked for one piece at a time: nobody waits for a thread's long text.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._ids: OrderedDict[str, U32] = OrderedDict()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def find(self, piece: str) -> U32 | None:
        with self._lock:
            ids = self._ids.get(piece)
            if ids is not None:
                self._ids.move_to_end(piece)
            return ids

    def keep(self, piece: str, ids: U32) -> None:
        with self._lock:
            if piece in self._ids:  # another thread was first
                return
            self._ids[piece] = ids
            self.num_bytes += _bytes_of(piece, ids)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _bytes_of(*self._ids.popitem(last=False))


def _bytes_of(piece: str, ids: U32) -> int:
    return sys.getsizeof(piece) + ids.nbytes + _ENTRY_BYTES


def _cut(text: str, size: int, cut_at: re.Pattern[str]) -> Iterator[str]:
    start = 0
    while cut := cut_at.search(text, start + size):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _leading_special_ids(backend: Tokenizer) -> list[int] | None:
    """Special tokens that each text begins with; None if there are others."""
    bare = backend.encode("a a", add_special_tokens=False).ids
    whole = backend.encode("a a", add_special_tokens=True).ids
    leading = whole[: len(whole) - len(bare)]
    return leading if leading + bare == whole else None
