"""Texts to token ids, piece by piece: a piece that was seen before is not tokenized again.

In:  a tokenizer, texts.   Out: uint32 token ids, equal to those of the text as a whole.

Requests that share a prefix share its pieces, so tokenizing costs what is new in a request. A text
is cut after every PIECE_CHARS characters, at the next space between a letter, a digit or simple
punctuation and a small letter. The pre-tokenizers in `_splits_there` begin a new word at such a
space whatever is around it, and byte-level BPE takes each word by itself. With any other tokenizer
texts are not cut.
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
from tokenizers import Tokenizer

U32 = npt.NDArray[np.uint32]

PIECE_CHARS: Final = 1024
MAX_PIECES: Final = 32_768
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
    """encode a text; num_new_characters of one. `cuts`: whether pieces are kept. Thread-safe."""

    def __init__(self, backend: Tokenizer) -> None:
        """The tokenizer must not change from now on."""
        self._backend = backend
        leading = _leading_special_ids(backend)
        self.cuts = leading is not None and _can_be_cut(json.loads(backend.to_str()))
        self._leading: U32 = np.array(leading or [], dtype=np.uint32)
        self._known: OrderedDict[str, U32] = OrderedDict()  # the piece used longest ago comes first
        self._lock = threading.Lock()

    def encode(self, text: str, *, with_special: bool) -> U32:
        """Token ids of a text; what the tokenizer raises for one that has none."""
        if not self.cuts:
            ids = self._backend.encode(text, add_special_tokens=with_special).ids
            return np.array(ids, dtype=np.uint32)
        leading = self._leading if with_special else self._leading[:0]
        return np.concatenate([leading, *map(self._ids_of, _pieces(text))])

    def num_new_characters(self, text: str) -> int:
        """How much of a text has to be tokenized: what takes time, a megabyte in 0.1 to 1 s."""
        if not self.cuts:
            return len(text)
        return sum(len(piece) for piece in _pieces(text) if piece not in self._known)

    def _ids_of(self, piece: str) -> U32:
        with self._lock:
            ids = self._known.get(piece)
            if ids is not None:
                self._known.move_to_end(piece)
                return ids
        encoding = self._backend.encode(piece, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.uint32)
        with self._lock:
            self._known[piece] = ids
            if len(self._known) > MAX_PIECES:
                self._known.popitem(last=False)
        return ids


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while cut := _CUT.search(text, start + PIECE_CHARS):
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
