"""What answers say of their tokens and of the cached ones, and where the events of a stream end.

In:  answers, the parts of streams.   Out: Usage or None, numbers of tokens, whole events.

Nothing is added to a request: a stream carries its usage only if the client asked for it
(`stream_options.include_usage`) or the engine always sends it.
"""

from __future__ import annotations

from collections import deque
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
