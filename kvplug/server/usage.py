"""How many tokens requests ask for, and what answers say of theirs and of the cached ones.

In:  request bodies, answers, the parts of streams.   Out: Usage, numbers of tokens, or None.

Nothing is added to a request: a stream carries its usage only if the client asked for it
(`stream_options.include_usage`) or the engine always sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvplug.audit.audit import Usage
from kvplug.router.decider import MAX_TOKENS

# The chunk with the usage is the last one before [DONE]; vLLM's has about 500 bytes.
_TAIL_BYTES = 8192
_COMPLETION_TOKENS = 16
_EVENT = b"\ndata:"
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MAX_EVENT_BYTES = 2**20  # a longer one is passed on as it comes
# Fields with which an engine computes prompt tokens that it has cached, or counts other ones.
_ODD_FIELDS = ("prompt_logprobs", "echo", "truncate_prompt_tokens", "logprob_start_len")


_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None
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
    cached_tokens = None if details is None else details.cached_tokens
    return Usage(usage.prompt_tokens, cached_tokens, usage.completion_tokens)


def max_tokens_of(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """How long the answer may get; None if the body does not say, or nonsense.

    OpenAI's default of a completion is 16, which vLLM 0.32 and SGLang 0.5.23 have, too.
    """
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    asked = next((body[name] for name in names if body.get(name) is not None), None)
    if asked is None and not is_chat:
        return _COMPLETION_TOKENS
    return min(asked, MAX_TOKENS) if type(asked) is int and asked > 0 else None


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


class WholeEvents:
    """Server-sent events that come in parts: add each part, pass on what it returns.

    A client would take what a broken stream has of an event for one, and fail to parse it.
    """

    def __init__(self) -> None:
        self._begun = b""

    def add(self, part: bytes) -> bytes:
        """The whole events so far that were not passed on."""
        events = self._begun + part
        ends = [events.rfind(blank) + len(blank) for blank in _BLANK_LINES if blank in events]
        end = max(ends, default=len(events) if len(events) > _MAX_EVENT_BYTES else 0)
        self._begun = events[end:]
        return events[:end]

    def take_begun(self) -> bytes:
        """What has come of the last event."""
        begun, self._begun = self._begun, b""
        return begun


class Stream:
    """Server-sent events of an answer: add each part, then ask for the usage and the length.

    Only the last bytes are kept.
    """

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        # Of the last event's end: a part may begin in the middle of a word.
        self._num_events, self._before = 0, b"\n"

    def add(self, part: bytes) -> bool:
        """The next part, as it goes to the client; whether it has the first event (a comment,
        which keeps a connection alive, is none).
        """
        num_before = self._num_events
        self._num_events += (self._before + part).count(_EVENT)
        self._before = (self._before + part)[1 - len(_EVENT) :]
        self._parts.append(part)
        self._num_bytes += len(part)
        while self._num_bytes - len(self._parts[0]) >= _TAIL_BYTES:
            self._num_bytes -= len(self._parts.popleft())
        return num_before == 0 < self._num_events

    def usage(self) -> Usage | None:
        """From the last chunk that has one."""
        for line in reversed(b"".join(self._parts).splitlines()):
            field, _, chunk = line.partition(b":")
            if field == b"data" and b'"usage"' in chunk and (usage := usage_of(chunk)):
                return usage
        return None

    @property
    def num_tokens(self) -> int:
        """Of the answer: as its usage says, else an event stands for a token."""
        usage = self.usage()
        if usage is not None and usage.completion_tokens is not None:
            return usage.completion_tokens
        return self._num_events - self._is_done

    @property
    def _is_done(self) -> bool:
        return b"data: [DONE]" in b"".join(self._parts)
