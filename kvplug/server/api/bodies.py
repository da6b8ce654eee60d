"""The JSON body of a request, read so that a large one holds up nobody else, and what it asks for.

In:  bytes.   Out: a dict of what routing needs, or ApiError; of a batch, the first two prompts.

Python objects of a 26 MB body, the largest but one by default, take seconds to make, and nothing
else runs meanwhile. So a kernel that releases the GIL cuts a large body into its fields, of its
prompts only those are read that routing looks at, and no other field that is long.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import numpy as np

from kvplug.api_errors import ApiError
from kvplug.events import Namespace, salt_with_extra_key
from kvplug.kernels.json_items import INCOMPLETE, WORDS_PER_ITEM, find_items
from kvplug.router.options import MAX_TOKENS
from kvplug.tokenization.prompt_kind import PromptKind

Body = dict[str, Any]

_LARGE_BYTES: Final = 100_000
# A text is copied at memory speed: so long a body with so few values takes under a millisecond.
_QUICK_BYTES: Final = 2**19
_QUICK_VALUES: Final = 2**13
_MAX_FIELDS: Final = 1000
# No engine's context is longer; a longer prompt is routed by load alone, and the engine refuses it.
_MAX_TOKEN_IDS: Final = 2**20
_MAX_TEXT_BYTES: Final = 2**23
# Objects of as many values are made in some milliseconds.
_MAX_VALUES: Final = 2**16

_COMPLETION_TOKENS: Final = 16
_MAX_TOKENS: Final[dict[PromptKind | None, tuple[str, ...]]] = {
    PromptKind.CHAT: ("max_completion_tokens", "max_tokens"),
    PromptKind.RESPONSES: ("max_output_tokens",),
}
# Fields with which an engine computes prompt tokens that it has cached, or counts other ones.
_ODD_FIELDS: Final = (
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",
    "logprob_start_len",
)

# The value of a field that is too long to be made a Python object.
UNREAD: Final = object()

_Item = tuple[bytes, int]


async def read_body(raw: bytes) -> Body:
    """A small body as it is; a large one in a thread, with the first two prompts of a batch, and
    UNREAD where a field is too long.
    """
    try:
        if len(raw) < _LARGE_BYTES or _is_quick(raw):
            return msgspec.json.decode(raw, type=Body)
        return await asyncio.to_thread(_read_large, raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body must be a JSON object: {error}"
        raise ApiError(400, message, code="invalid_json") from error


def _is_quick(raw: bytes) -> bool:
    """Whether it is mostly text: no value is without a comma or a colon."""
    return len(raw) <= _QUICK_BYTES and raw.count(b",") + raw.count(b":") <= _QUICK_VALUES


def _read_large(raw: bytes) -> Body:
    raw = raw.strip()
    if not raw.startswith(b"{"):
        raise msgspec.DecodeError("it does not begin with {")
    items = _items(raw, 2 * _MAX_FIELDS)
    if len(items) % 2:
        raise msgspec.DecodeError("a name without a value")
    body: Body = {}
    for (name, _), (value, num_separators) in zip(items[::2], items[1::2], strict=True):
        field = msgspec.json.decode(name, type=str)
        if field == "prompt":
            body[field] = first_prompts(value.strip(), num_separators)
        else:
            is_long = num_separators >= _MAX_VALUES
            body[field] = UNREAD if is_long else msgspec.json.decode(value)
    return body


def _items(raw: bytes, limit: int) -> list[_Item]:
    """At most so many items of an object or array, each with its number of separators."""
    bounds = np.empty(WORDS_PER_ITEM * limit, dtype=np.int64)
    count = find_items(np.frombuffer(raw, dtype=np.uint8), bounds)
    if count == INCOMPLETE:
        raise msgspec.DecodeError("it ends in the middle")
    found = bounds.reshape(limit, WORDS_PER_ITEM)[:count].tolist()
    return [(raw[begin:end], num_separators) for begin, end, num_separators in found]


def first_prompts(raw: bytes, num_separators: int) -> object:
    """The value of `prompt`: text or token ids as they are; of a list of prompts the first, twice
    if there are more. UNREAD if it is longer than any engine's context.
    """
    if not raw.startswith(b"["):
        return _prompt(raw, num_separators)
    first = _items(raw, 2)
    if first and first[0][0].lstrip().startswith((b'"', b"[")):
        prompt = _prompt(*first[0])
        return prompt if prompt is UNREAD else [prompt] * len(first)
    return _prompt(raw, num_separators)


def _prompt(raw: bytes, num_separators: int) -> object:
    is_text = not raw.lstrip().startswith(b"[")
    if num_separators >= _MAX_TOKEN_IDS or (is_text and len(raw) > _MAX_TEXT_BYTES):
        return UNREAD
    return msgspec.json.decode(raw)


def namespace_of(body: Body, lora_name: str = "") -> Namespace:
    """What separates its blocks from those of others with equal tokens, as events name it.

    A batch of prompts is represented by its first one. vLLM and SGLang keep requests apart by LoRA
    adapter and by `cache_salt`. SGLang also knows `extra_key`. Its own events (0.5.23) leave it out
    in either format, so such a request gets a namespace that none of them is in; the events of
    kvplug's plug-in are. Where its like went is known from the routing itself in any case.
    """
    salt = salt_with_extra_key(_text(body, "cache_salt"), _text(body, "extra_key"))
    return Namespace(lora_name=lora_name, salt=salt)


def has_unread_fields(body: Body) -> bool:
    """Whether what the engine makes of the body cannot be known for its length."""
    return any(value is UNREAD for value in body.values())


def has_extra_key(body: Body) -> bool:
    """Whether the request is kept apart by something that no event says."""
    return bool(_text(body, "extra_key"))


def lora_path_of(body: Body) -> str:
    """The adapter that SGLang is asked for beside the model's name; "" if none."""
    return _text(body, "lora_path")


def max_tokens_of(body: Body, kind: PromptKind | None) -> int | None:
    """How long the answer may get; None if the body does not say, or nonsense.

    OpenAI's default of a completion is 16, which vLLM 0.32 and SGLang 0.5.23 have, too.
    """
    names = _MAX_TOKENS.get(kind, ("max_tokens",))
    asked = next((body[name] for name in names if body.get(name) is not None), None)
    if asked is None and kind is PromptKind.COMPLETION:
        return _COMPLETION_TOKENS
    return min(asked, MAX_TOKENS) if type(asked) is int and asked > 0 else None


def unauditable(body: Body) -> str | None:
    """Why the usage of a request's answer would not tell about its prefix, or None.

    vLLM 0.32 sums the tokens of all prompts of a body, and reports the cached ones of one.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several_prompts"
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return "several_answers"
    odd = (body.get(name) for name in _ODD_FIELDS)
    if any(value is not None and value is not False for value in odd):
        return "computes_otherwise"
    return None


def _text(body: Body, field: str) -> str:
    """A text, or the first of a list of texts: SGLang takes one for each prompt."""
    value = body.get(field)
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""
