"""The JSON body of a request, read so that a large one holds up nobody else, and its namespace.

In:  bytes.   Out: a dict of what routing needs, or ApiError; of a batch, the first two prompts.

Python objects of a 26 MB body, the largest but one by default, take seconds to make, and other
requests wait meanwhile. So a large body is first cut into its fields, which takes milliseconds, and
of its prompts only those are read that routing looks at.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import msgspec

from kvplug.api_errors import ApiError
from kvplug.events import Namespace

Body = dict[str, Any]

_LARGE_BYTES: Final = 100_000
# No engine's context is longer; a longer prompt is routed by load alone, and the engine refuses it.
_MAX_TOKEN_IDS: Final = 2**20
_SPACE: Final = b" \t\n\r"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = json.JSONDecoder()


async def read_body(raw: bytes) -> Body:
    """A small body as it is; a large one in a thread, with the first two prompts of a batch."""
    try:
        if len(raw) < _LARGE_BYTES:
            return msgspec.json.decode(raw, type=Body)
        return await asyncio.to_thread(_read_large, raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body must be a JSON object: {error}"
        raise ApiError(400, message, code="invalid_json") from error


def _read_large(raw: bytes) -> Body:
    fields = _fields.decode(raw)
    prompt = fields.pop("prompt", None)
    body = {name: msgspec.json.decode(value) for name, value in fields.items()}
    if prompt is not None:
        body["prompt"] = first_prompts(bytes(prompt))
    return body


def first_prompts(raw: bytes) -> object:
    """The value of `prompt`, valid JSON: text or token ids as they are; of a list of prompts the
    first, twice if there are more. Too many token ids are None.
    """
    if not raw.startswith(b"["):
        return msgspec.json.decode(raw)
    inner = raw[1:].lstrip(_SPACE)
    if inner.startswith(b'"'):
        text = inner.decode()
        first, end = _string.raw_decode(text)
        return [first] * (1 + text[end:].lstrip().startswith(","))
    if inner.startswith(b"["):
        end = inner.index(b"]") + 1
        return [_ids(inner[:end])] * (1 + inner[end:].lstrip(_SPACE).startswith(b","))
    return _ids(raw)


def _ids(raw: bytes) -> object:
    if raw.count(b",") >= _MAX_TOKEN_IDS:
        return None
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None  # a list of lists of lists, cut in the middle: no prompt


def namespace_of(body: Body, lora_name: str = "") -> Namespace:
    """What separates its blocks from those of others with equal tokens, as events name it.

    A batch of prompts is represented by its first one. vLLM and SGLang keep requests apart by LoRA
    adapter and by `cache_salt`. SGLang knows `extra_key` besides, which its events (0.5.23) leave
    out in either format: what such a request finds cached cannot be known, so it gets a namespace
    that no event is in. Where its like went is still known from the routing itself.
    """
    salt, extra_key = _text(body, "cache_salt"), _text(body, "extra_key")
    if extra_key:
        salt = f"\0extra_key\0{extra_key}\0{salt}"
    return Namespace(lora_name=lora_name, salt=salt)


def has_extra_key(body: Body) -> bool:
    """Whether the request is kept apart by something that no event says."""
    return bool(_text(body, "extra_key"))


def lora_path_of(body: Body) -> str:
    """The adapter that SGLang is asked for beside the model's name; "" if none."""
    return _text(body, "lora_path")


def _text(body: Body, field: str) -> str:
    """A text, or the first of a list of texts: SGLang takes one for each prompt."""
    value = body.get(field)
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""
