"""Texts to token ids, piece by piece: a piece that was seen before is not tokenized again.

In:  a tokenizer, texts.   Out: uint32 token ids, equal to those of the text as a whole.

Requests that share a prefix share its pieces, so tokenizing costs what is new in a request. A text
is cut into large pieces, and those that are not known into small ones: few have to be looked up,
and little of a shared prefix is tokenized with what follows it. A piece ends at the first space
behind its size that is between a letter, a digit or simple punctuation and a small letter. The
pre-tokenizers in `_splits_there` begin a new word at such a space whatever is around it, and
byte-level BPE takes each word by itself. With any other tokenizer texts are not cut.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

U32 = npt.NDArray[np.uint32]

LARGE_CHARS: Final = 4096
SMALL_CHARS: Final = 256
MAX_LARGE: Final = 4096
MAX_SMALL: Final = 65_536
_CUT: Final = re.compile(r"(?<=[A-Za-z0-9.,;:)]) (?=[a-z])")
_BEFORE_CUT: Final = re.compile(r"[A-Za-z0-9.,;:)]\Z")
# GPT-2's words are built into `ByteLevel`; these are those of Llama 3, and of Qwen 2 and later. In
# none of them does a word go on behind a space.
_WORDS: Final = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + "|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)


class PieceEncoder:
    """encode a text. `cuts`: whether pieces are kept. Thread-safe."""

    def __init__(self, backend: Tokenizer) -> None:
        """The tokenizer must not change from now on."""
        self._backend = backend
        leading = _leading_special_ids(backend)
        self.cuts = leading is not None and _can_be_cut(json.loads(backend.to_str()))
        self._leading: U32 = np.array(leading or [], dtype=np.uint32)
        self._large, self._small = _Pieces(MAX_LARGE), _Pieces(MAX_SMALL)

    def encode(self, text: str, *, with_special: bool, max_new: int) -> U32 | None:
        """Token ids of a text; what the tokenizer raises for one that has none.

        None if more than `max_new` characters would have to be tokenized, which is what takes time:
        0.1 to 1 s for a million.
        """
        if not self.cuts:
            if len(text) > max_new:
                return None
            return _ids(self._backend.encode(text, add_special_tokens=with_special))
        found = self._look_up(text, max_new)
        if found is None:
            return None
        parts, unknown = found
        ids = [self._tokenize(part) if isinstance(part, str) else part for part in parts]
        self._keep(parts, unknown, ids)
        return np.concatenate([self._leading if with_special else self._leading[:0], *ids])

    def _look_up(
        self, text: str, max_new: int
    ) -> tuple[list[str | U32], list[tuple[str, slice]]] | None:
        """What is known of a text, and the small pieces that are not; large ones with their parts,
        if they are not known. None as soon as too much is not.
        """
        parts: list[str | U32] = []
        unknown = []
        num_new = 0
        for piece in _cut(text, LARGE_CHARS):
            ids = self._large.find(piece)
            if ids is not None:
                parts.append(ids)
                continue
            begin = len(parts)
            for small in _cut(piece, SMALL_CHARS):
                ids = self._small.find(small)
                parts.append(small if ids is None else ids)
                num_new += len(small) if ids is None else 0
            if num_new > max_new:
                return None
            unknown.append((piece, slice(begin, len(parts))))
        return parts, unknown

    def _tokenize(self, piece: str) -> U32:
        return _ids(self._backend.encode(piece, add_special_tokens=False))

    def _keep(
        self, parts: list[str | U32], unknown: list[tuple[str, slice]], ids: list[U32]
    ) -> None:
        for part, its in zip(parts, ids, strict=True):
            if isinstance(part, str):
                self._small.keep(part, its)
        for piece, where in unknown:
            if len(piece) >= LARGE_CHARS:  # else it is the end of one text
                self._large.keep(piece, np.concatenate(ids[where]))


class _Pieces:
    """Token ids by piece, of so many; the one used longest ago goes first.

    Locked for one piece at a time: the event loop does not wait for a thread's long text.
    """

    def __init__(self, most: int) -> None:
        self._ids: OrderedDict[str, U32] = OrderedDict()
        self._most = most
        self._lock = threading.Lock()

    def find(self, piece: str) -> U32 | None:
        with self._lock:
            ids = self._ids.get(piece)
            if ids is not None:
                self._ids.move_to_end(piece)
            return ids

    def keep(self, piece: str, ids: U32) -> None:
        with self._lock:
            self._ids[piece] = ids
            if len(self._ids) > self._most:
                self._ids.popitem(last=False)


def _ids(encoding: Encoding) -> U32:
    return np.array(encoding.ids, dtype=np.uint32)


def _cut(text: str, size: int) -> Iterator[str]:
    start = 0
    while cut := _CUT.search(text, start + size):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _leading_special_ids(backend: Tokenizer) -> list[int] | None:
    """Special tokens that each text begins with; None if there are others."""
    bare = backend.encode("a a", add_special_tokens=False).ids
    whole = backend.encode("a a", add_special_tokens=True).ids
    leading = whole[: len(whole) - len(bare)]
    return leading if leading + bare == whole else None


def _can_be_cut(settings: dict[str, Any]) -> bool:
    model, normalizer = settings["model"], settings["normalizer"]
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer == {"type": "NFC"})
        and _splits_there(settings["pre_tokenizer"])
        and not any(map(_may_cross, settings["added_tokens"]))
    )


def _splits_there(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a word always begins where a text is cut."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_words}:
            return bool(uses_words)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated"} as split,
                {"type": "ByteLevel", "add_prefix_space": False},
            ],
        }:
            return words in _WORDS and not split["invert"]
    return False


def _may_cross(token: dict[str, Any]) -> bool:
    """Whether an added token can have the space of a cut in it, or take it along."""
    takes_along = token["rstrip"] and _BEFORE_CUT.search(token["content"])
    return " " in token["content"] or bool(takes_along)
