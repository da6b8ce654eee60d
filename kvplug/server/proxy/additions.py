"""What the router may ask an engine for beside what the client asked for, and takes out again.

In:  the fields of a body, settings.   Out: the body with them; events as the client expects them.

With neither setting a body goes as it was received. Both put fields in front of the client's, so
that the rest of the bytes stays; a client's own field of that name comes later, and counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

CONTINUED: Final = frozenset(("/v1/completions", "/v1/chat/completions"))
"""The endpoints whose engines know these fields."""
_USAGE: Final = b'"stream_options":{"include_usage":true},'
_TOKEN_IDS: Final = b'"return_token_ids":true,'
_NO_CHOICES: Final = re.compile(rb'"choices": ?\[\]')
# In a text of the answer the quotes would be escaped. vLLM 0.32 has nulls where nobody asks.
TOKEN_IDS: Final = re.compile(rb', ?"(prompt_)?token_ids": ?(?:null|\[([\d, ]*)\])')
# vLLM 0.32 sends it only if it is asked for token ids.
_EMPTY: Final = re.compile(rb'"delta": ?\{\}.*"finish_reason": ?null')


class Additions(NamedTuple):
    """usage: a last chunk that has it; token_ids: those of each chunk, and the prompt's."""

    usage: bool = False
    token_ids: bool = False

    def in_body(self, raw: bytes) -> bytes:
        """The body of a request that streams, so that it has fields."""
        fields = (_USAGE if self.usage else b"") + (_TOKEN_IDS if self.token_ids else b"")
        begin = raw.index(b"{") + 1
        return raw[:begin] + fields + raw[begin:] if fields else raw

    def taken_out(self, events: bytes) -> bytes:
        """Whole events as they would be without what was added."""
        if self.token_ids:
            events = TOKEN_IDS.sub(rb',"\1token_ids":null', events)
            if _EMPTY.search(events):
                events = _kept(events, lambda event: _EMPTY.search(event) is None)
        if self.usage and _NO_CHOICES.search(events):
            events = _kept(events, lambda event: not _is_usage(event))
        return events


NO_ADDITIONS: Final = Additions()


def usage_to_ask(body: Mapping[str, Any]) -> bool:
    """Whether a stream's usage may be asked for: the client says nothing of it."""
    return body.get("stream") is True and "stream_options" not in body


def _kept(events: bytes, is_kept: Callable[[bytes], bool]) -> bytes:
    return b"".join(each + b"\n\n" for each in events.split(b"\n\n") if each and is_kept(each))


def _is_usage(event: bytes) -> bool:
    try:
        chunk = msgspec.json.decode(event.removeprefix(b"data:"))
    except msgspec.DecodeError:
        return False
    return chunk.get("choices") == [] and chunk.get("usage") is not None
