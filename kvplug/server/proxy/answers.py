"""The events of an answer's stream: where they end, and what they say of its tokens.

In:  the parts of a stream.   Out: whole events, Usage or None, a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvplug.audit.audit import Usage
from kvplug.server.proxy.usage import last_reported

# The chunk with the usage is the last one before [DONE]; vLLM's has about 500 bytes.
_TAIL_BYTES = 8192
_OPENING_BYTES = 2048  # the first event of a message has about 500
_EVENT = b"\ndata:"
_DONE = b"data: [DONE]\n\n"
_RESPONSE = b"\nevent: response."
_DELTA = b'.delta"'
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MAX_EVENT_BYTES = 2**20  # a longer one is passed on as it comes


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these headers comes event by event."""
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.partition(b";")[0].strip().lower() == b"text/event-stream"
    return False


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
        self._opening = b""

    def add(self, part: bytes) -> bool:
        """The next part, as it goes to the client; whether it has the first token, or event that
        may be one: a comment, which keeps a connection alive, is none.
        """
        self._parts.append(part)
        self._num_bytes += len(part)
        if len(self._opening) < _OPENING_BYTES:
            self._opening += part[:_OPENING_BYTES]
        if self._num_bytes > 2 * _TAIL_BYTES:
            self._keep_tail()
        if self._has_begun:
            return False
        tail = self._tail
        # A response is announced before the engine has begun with it.
        mark = _DELTA if tail.startswith(_RESPONSE) else _EVENT
        self._has_begun = mark in tail
        return self._has_begun

    @property
    def is_done(self) -> bool:
        """Whether it said that nothing more comes."""
        return self._tail.endswith(_DONE)

    def usage(self) -> Usage | None:
        """From the last chunk that has one."""
        last = last_reported(self._tail)
        if last is None:
            return None
        first = last_reported(self._opening.partition(b"\n\n")[0])
        return last.usage if first is None else last.with_prompt_of(first).usage

    @property
    def num_tokens(self) -> int:
        """Of the answer: as its usage says, else an event stands for a token."""
        usage = self.usage()
        if usage is not None and usage.completion_tokens is not None:
            return usage.completion_tokens
        num_events = self._num_events_before + self._tail.count(_EVENT)
        return num_events - (_DONE.rstrip() in self._tail)

    @property
    def _tail(self) -> bytes:
        return b"".join(self._parts)

    def _keep_tail(self) -> None:
        text = self._tail
        begin = len(text) - _TAIL_BYTES
        self._num_events_before += text.count(_EVENT, 0, begin + len(_EVENT) - 1)
        self._parts, self._num_bytes = [text[begin:]], _TAIL_BYTES
