"""What an answer says of the tokens that its prompt had, and how many of them were cached.

In:  request bodies, answers, the last parts of streams.   Out: Usage, or None.

Nothing is added to a request: a stream carries its usage only if the client asked for it
(`stream_options.include_usage`) or the engine always sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvplug.audit.router import Usage

# The chunk with the usage is the last one before [DONE]; vLLM's has about 500 bytes.
_TAIL_BYTES = 8192
# Fields with which an engine computes prompt tokens that it has cached, or counts other ones.
_ODD_FIELDS = ("prompt_logprobs", "echo", "truncate_prompt_tokens", "logprob_start_len")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


def usage_of(answer: bytes) -> Usage | None:
    """From an answer, or one chunk of it; None if it has none, or is no such JSON."""
    try:
        usage = _decoder.decode(answer).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, None if details is None else details.cached_tokens)


def unauditable(body: Mapping[str, Any]) -> str | None:
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


class StreamTail:
    """The last bytes of a stream: add each part, then ask for the usage."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        """The next part, as it goes to the client."""
        self._parts.append(part)
        self._num_bytes += len(part)
        while self._num_bytes - len(self._parts[0]) >= _TAIL_BYTES:
            self._num_bytes -= len(self._parts.popleft())

    def usage(self) -> Usage | None:
        """From the last chunk that has one."""
        for line in reversed(b"".join(self._parts).splitlines()):
            field, _, chunk = line.partition(b":")
            if field == b"data" and b'"usage"' in chunk and (usage := usage_of(chunk)):
                return usage
        return None
