"""Texts to their token ids, by the faster of two libraries.

In:  a tokenizer of `tokenizers`, as it was configured.   Out: a function: texts -> token ids.

`fastokens`, if it is installed, is 10 to 200 times faster (docs/performance.md) and is taken where
it agrees: for the kinds of tokenizers that tests/tokenization/test_real_families.py compares, and
if both give the same ids for `_SAMPLES` and for the tokenizer's own added tokens.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvplug.tokenization.cuts import is_known

logger = logging.getLogger(__name__)

U32 = npt.NDArray[np.uint32]

# What tokenizers are known to differ in.
_SAMPLES: Final = (
    "",
    " ",
    "Hello, world! It's 12345.67 o'clock; they'LL come.",
    "  two  spaces\tand\ttabs \n\n\n  lines\r\n\r\nends   ",
    "def f(x: int) -> str:\n    return f'{x:>08}'  # 100_000\n",
    '{"key": [1, 2.5e-3, null], "text": "a\\nb"}\n</tool_call>',
    "na\u00efve \u00c5ngstr\u00f6m \ufb01 \u00bd \u00b2 e\u0301 a\u0308\u0323 \u212b",
    "漢字かな交じり文。中文、標點\uff0c한국어 문장입니다\uff01",
    "Привет мир. עברית العربية ไทย हिन्दी",
    "\U0001f642 \U0001f469\u200d\U0001f467 \u200b\ufeff\u00a0\u2028\u3000x\x00\x7f",
    "CamelCaseHTTPServer snake_case SCREAMING iPhone McDonald\u2019s",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ======== ////",
)
_MAX_ADDED: Final = 64


class TextEncoder(Protocol):
    """Texts to token ids; raises what the library raises for a text that has none."""

    def __call__(self, texts: list[str], *, with_special: bool) -> list[U32]:
        """Each text by itself."""


def slow_encoder(backend: Tokenizer) -> TextEncoder:
    """By `tokenizers` itself, one after the other: together they would take all cores."""

    def encode(texts: list[str], *, with_special: bool) -> list[U32]:
        encodings = (backend.encode(text, add_special_tokens=with_special) for text in texts)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return encode


def text_encoder(backend: Tokenizer) -> tuple[TextEncoder, str]:
    """The faster one that agrees, and the name of its library."""
    slow = slow_encoder(backend)
    if backend.encode_special_tokens or not is_known(backend) or _compete(backend):
        return slow, "tokenizers"
    fast = _fast_encoder(backend)
    if fast is None or not _agree(fast, slow, backend):
        return slow, "tokenizers"
    return fast, "fastokens"


def _compete(backend: Tokenizer) -> bool:
    """Whether an added token with `normalized` overlaps one without.

    `tokenizers` looks for the latter first; fastokens 0.3.5 for both at once.
    """
    kinds: tuple[list[str], list[str]] = ([], [])
    for token in backend.get_added_tokens_decoder().values():
        kinds[bool(token.normalized)].append(token.content)
    return _reach_into(*kinds) or _reach_into(*reversed(kinds))


def _reach_into(some: list[str], others: list[str]) -> bool:
    begins = {text[:size] for text in some for size in range(1, len(text))}
    ends = {text[-size:] for text in others for size in range(1, len(text))}
    joined = "\0".join(others)
    return not begins.isdisjoint(ends) or any(text in joined for text in some)


def _fast_encoder(backend: Tokenizer) -> TextEncoder | None:
    try:
        from fastokens import Tokenizer as FastTokenizer
    except ImportError:
        return None
    try:
        flat: Callable[..., Any] = FastTokenizer.from_json_str(backend.to_str()).encode_batch_flat
    except Exception as error:  # noqa: BLE001 - of a foreign library; the other one will do
        logger.info("fastokens cannot load this tokenizer, tokenizers does: %s", error)
        return None

    def encode(texts: list[str], *, with_special: bool) -> list[U32]:
        # One call for all: a call costs more than a short text.
        flat_ids, ends = flat(texts, add_special_tokens=with_special)
        ids = np.frombuffer(flat_ids, dtype=np.uint32)
        bounds = np.frombuffer(ends, dtype=np.uint64).tolist()
        # A copy each, as one that is kept would keep all of them.
        return [ids[begin:end].copy() for begin, end in itertools.pairwise(bounds)]

    return encode


def _agree(fast: TextEncoder, slow: TextEncoder, backend: Tokenizer) -> bool:
    added = [token.content for token in backend.get_added_tokens_decoder().values()][:_MAX_ADDED]
    samples = (*_SAMPLES, " ".join(added), "word".join(added), "\n".join(_SAMPLES))
    for text in samples:
        for with_special in (False, True):
            [expected] = slow([text], with_special=with_special)
            try:
                [ids] = fast([text], with_special=with_special)
            except Exception:  # noqa: BLE001
                ids = None
            if ids is None or not np.array_equal(ids, expected):
                logger.warning("fastokens is not used: it gives other token ids for %r", text[:80])
                return False
    return True
