"""What answers say of their tokens and of the cached ones, and where the events of a stream end.

In:  answers, the parts of streams.   Out: Usage or None, numbers of tokens, whole events.

Nothing is added to a request: a stream carries its usage only if the client asked for it
(`stream_options.include_usage`) or the engine always sends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvplug.audit.audit import Usage
from kvplug.router.options import MAX_TOKENS

# The chunk with the usage is the last one before [DONE]; vLLM's has about 500 bytes.
_TAIL_BYTES = 8192
_EVENT = b"\ndata:"
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MAX_EVENT_BYTES = 2**20  # a longer one is passed on as it comes

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


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these headers comes event by event."""
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.partition(b";")[0].strip().lower() == b"text/event-stream"
    return False


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


class WholeEvents:
    """Server-sent events that come in parts: add each part, pass on what it returns.

    A client would take what a broken stream has of an event for one, and fail to parse it.
    """

    def __init__(self) -> None:
        self._begun = b""

    def add(self, part: bytes) -> bytes:
        """The whole events so far that were not passed on."""
        if not self._begun and part.endswith(b"\n\n"):
            return part
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

    Only the last bytes are kept, and looked at when there are enough of them: a part costs an
    append.
    """

    def __init__(self) -> None:
        self._parts, self._num_bytes = [b"\n"], 1  # as if behind a line
        self._num_events_before, self._has_begun = 0, False

    def add(self, part: bytes) -> bool:
        """The next part, as it goes to the client; whether it has the first event (a comment,
        which keeps a connection alive, is none).
        """
        self._parts.append(part)
        self._num_bytes += len(part)
        if self._num_bytes > 2 * _TAIL_BYTES:
            self._keep_tail()
        if self._has_begun:
            return False
        self._has_begun = self._num_events > 0
        return self._has_begun

    def usage(self) -> Usage | None:
        """From the last chunk that has one."""
        for line in reversed(self._tail.splitlines()):
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
        return self._num_events - (b"data: [DONE]" in self._tail)

    @property
    def _tail(self) -> bytes:
        return b"".join(self._parts)

    @property
    def _num_events(self) -> int:
        return self._num_events_before + self._tail.count(_EVENT)

    def _keep_tail(self) -> None:
        text = self._tail
        begin = len(text) - _TAIL_BYTES
        self._num_events_before += text.count(_EVENT, 0, begin + len(_EVENT) - 1)
        self._parts, self._num_bytes = [text[begin:]], _TAIL_BYTES
