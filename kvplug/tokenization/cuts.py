"""Where a text may be cut so that its pieces have the token ids of the whole.

In:  a tokenizer, the tokens that its chat templates write.
Out: a pattern that matches between two characters, or None: this tokenizer's texts stay whole.

Three kinds of places. Before a marker: tokenizers take added tokens out of a text before anything
else and treat what is between them by itself, so this holds for any model. Before a space, behind
a line break and before a full stop: where the words of a byte-level BPE cannot go on, which was
read off the patterns in `_WORDS`; or, for a BPE that knows no words, where no token of its
vocabulary has both characters, so that no merge crosses. tests/tokenization/test_real_families.py
compares the pieces with the whole on the tokenizers of real models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

_Json = dict[str, Any]
# A template writes a handful of them; without a template the first ones are taken.
_MAX_MARKERS: Final = 64


class _Place(NamedTuple):
    """A cut between a character of `left` and one of `right`, before `rest`; classes of `re`."""

    left: str
    right: str
    rest: str = ""

    @property
    def pattern(self) -> str:
        return f"(?<={self.left})(?={self.right}{self.rest})"

    def is_within(self, text: str) -> bool:
        return re.search(self.left + self.right, text) is not None

    def is_near(self, token: _Json) -> bool:
        """Whether an added token that looks at its neighbours may lie beside the cut."""
        if not (token["lstrip"] or token["rstrip"] or token["single_word"]):
            return False
        begins = re.match(self.right, token["content"])
        ends = re.search(self.left + r"\Z", token["content"])
        # At a space no word goes on either way.
        return bool(begins or (ends and (token["rstrip"] or self.right != " ")))


_BEFORE_SPACE: Final = _Place("[A-Za-z0-9.,;:)]", " ", "[a-z]")
_BEHIND_LINE: Final = _Place("\n", "[A-Za-z]")
# Between a Chinese, Japanese or Korean letter and what ends its clause: such texts have no spaces.
_BEFORE_STOP: Final = _Place(
    "[\u4e00-\u9fa5\u3041-\u3096\u30a1-\u30fa\uac00-\ud7a3]",
    "[\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f]",
)

_GPT2: Final = (_BEFORE_SPACE, _BEFORE_STOP)  # it takes line breaks together with what follows
_NEWER: Final = (_BEFORE_SPACE, _BEHIND_LINE, _BEFORE_STOP)

_TAIL: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{_UPPER}*{_LOWER}+{suffix}|{first}{_UPPER}+{_LOWER}*{suffix}"
    return words + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL


# GPT-2's words are built into `ByteLevel`. None of these goes on behind a space, a line break or a
# letter before a full stop, and none looks there.
_WORDS: Final = frozenset(
    [
        # Llama 3 and GLM; Qwen 2 and 3
        *(
            _SUFFIXES
            + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
            + _TAIL
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        # Qwen 3.5
        _SUFFIXES
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        + _TAIL,
        _cased(_SUFFIXES + "?", r"\p{N}{1,3}"),  # GPT-4o and gpt-oss
        _cased("", r"\p{N}"),  # Mistral's Tekken
    ]
)
_DEEPSEEK: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
)
_COMPOSING: Final = ("NFC", "NFKC")  # neither joins characters at any of these places


def cut_pattern(backend: Tokenizer, written: str = "") -> re.Pattern[str] | None:
    """Where texts may be cut; `written`: the templates, whose added tokens are the markers."""
    settings = json.loads(backend.to_str())
    added = settings["added_tokens"]
    places = [place.pattern for place in _places(settings) if not _is_crossed(place, added)]
    if not backend.encode_special_tokens:
        markers = list(_markers(settings, written))[:_MAX_MARKERS]
        places += [f"(?={'|'.join(map(re.escape, markers))})"] if markers else []
    if not places or settings["model"].get("dropout"):
        return None
    return re.compile("|".join(places))


def is_known(backend: Tokenizer) -> bool:
    """Whether it is a BPE of bytes with words of `_WORDS`, or one that falls back to bytes."""
    settings = json.loads(backend.to_str())
    model = settings["model"]
    is_bytes = model.get("byte_fallback") or _word_places(settings["pre_tokenizer"])
    return bool(model["type"] == "BPE" and not model.get("dropout") and is_bytes)


def _places(settings: _Json) -> Iterable[_Place]:
    if settings["model"]["type"] != "BPE":
        return ()
    steps = _steps(settings["normalizer"], "normalizers")
    if all(step["type"] in _COMPOSING for step in steps):
        words = _word_places(settings["pre_tokenizer"])
        return words or _merge_places(settings, steps)
    return _merge_places(settings, steps)


def _word_places(pre_tokenizer: _Json | None) -> tuple[_Place, ...]:
    """Of a byte-level pre-tokenizer, by its words."""
    match _steps(pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [*splits, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            words = tuple(_words_of(split) for split in splits)
            if words == _DEEPSEEK or (len(words) == 1 and words[0] in _WORDS):
                return _NEWER
    return ()


def _words_of(split: _Json) -> str | None:
    match split:
        case {"type": "Split", "pattern": {"Regex": words}, "behavior": how, "invert": inverted}:
            # Every character is in a word, so to remove what is between them removes nothing.
            is_plain = (how, inverted) in (("Isolated", False), ("Removed", True))
            # Some files have the two characters themselves.
            return words.replace("\r", r"\r").replace("\n", r"\n") if is_plain else None
    return None


def _merge_places(settings: _Json, steps: list[_Json]) -> Iterable[_Place]:
    """Of a BPE without words: the places that no token of the vocabulary spans."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    match steps, _steps(settings["pre_tokenizer"], "pretokenizers"):
        # The second splits at spaces, of which the normalizer has left none.
        case [], [{"type": "Metaspace", "replacement": "▁"}]:
            candidates: tuple[_Place, ...] = (_BEFORE_SPACE,)  # it looks at how a text begins
        case [step], [] | [{"type": "Split", "pattern": {"String": " "}}] if step == space:
            candidates = (_BEFORE_SPACE, _BEHIND_LINE)
        case _:
            return ()
    vocabulary = settings["model"]["vocab"]
    has_all = all(chr(code) in vocabulary for code in (10, *range(33, 127)))
    pairs = "\0".join(vocabulary).replace("▁", " ")
    return [each for each in candidates if has_all and not each.is_within(pairs)]


def _steps(part: _Json | None, name: str) -> list[_Json]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _is_crossed(place: _Place, added: list[_Json]) -> bool:
    return any(place.is_within(token["content"]) or place.is_near(token) for token in added)


def _markers(settings: _Json, written: str) -> Iterable[str]:
    """Added tokens that are found wherever they stand, whatever is before them."""
    added = settings["added_tokens"]
    is_plain = not _steps(settings["normalizer"], "normalizers")
    tails = [token["content"][1:] for token in added]
    ends = {tail[start:] for tail in tails for start in range(len(tail))}
    inner = "\0".join(tails)
    for token in added:
        content = token["content"]
        wanted = content in written if written else token["special"]
        stands = is_plain or not token["normalized"]
        looks = token["lstrip"] or token["single_word"]
        # Another token that begins before it may reach into it.
        sizes = range(1, len(content))
        is_reached = content in inner or any(content[:size] in ends for size in sizes)
        if wanted and stands and not looks and content.isprintable() and not is_reached:
            yield content
