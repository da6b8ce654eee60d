"""What an answer says of its tokens: the usage of three APIs.

In:  JSON of an answer, or the end of a stream.   Out: Reported, from it Usage.

OpenAI's completions and chats count `prompt_tokens`, its responses `input_tokens`; both include the
cached ones, which the details name. Anthropic's messages count those apart. A stream of messages
says at its beginning how long the prompt is, and SGLang 0.5.23 says it nowhere else.
"""

from __future__ import annotations

import json
from typing import Annotated, Final, Self

import msgspec

from kvplug.audit.audit import Usage
from kvplug.router.options import MAX_TOKENS

_USAGE: Final = b'"usage"'
_reader: Final = json.JSONDecoder()
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class Reported(msgspec.Struct):
    """A usage as an engine writes it; None for what it leaves out."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    def with_prompt_of(self, first: Self) -> Self:
        """What the last event of a stream says; of the prompt what the first one did, if need
        be.
        """
        if self.prompt_tokens is not None or self.input_tokens is not None:
            return self
        return msgspec.structs.replace(
            first, completion_tokens=self.completion_tokens, output_tokens=self.output_tokens
        )

    @property
    def usage(self) -> Usage | None:
        """In one form; None if it does not say how long the prompt is."""
        if self.prompt_tokens is not None:
            cached = _cached(self.prompt_tokens_details)
            return Usage(self.prompt_tokens, cached, self.completion_tokens)
        if self.input_tokens is None:
            return None
        if self.input_tokens_details is not None:
            return Usage(self.input_tokens, _cached(self.input_tokens_details), self.output_tokens)
        read, created = self.cache_read_input_tokens, self.cache_creation_input_tokens
        return Usage(self.input_tokens + (read or 0) + (created or 0), read, self.output_tokens)


class _Answer(msgspec.Struct):
    usage: Reported | None = None


_decoder: Final = msgspec.json.Decoder(_Answer)


def usage_of(answer: bytes) -> Usage | None:
    """From a whole answer; None if it has none, or is no such JSON."""
    try:
        reported = _decoder.decode(answer).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if reported is None else reported.usage


def last_reported(events: bytes) -> Reported | None:
    """The last usage in a piece of a stream, whatever it is a part of.

    In a text of the answer its name would be escaped, so that no text is taken for one.
    """
    at = events.rfind(_USAGE)
    while at >= 0:
        value = events[at + len(_USAGE) :].lstrip()
        if value.startswith(b":") and (reported := _reported(value[1:].lstrip())):
            return reported
        at = events.rfind(_USAGE, 0, at)
    return None


def _reported(value: bytes) -> Reported | None:
    try:
        found, _ = _reader.raw_decode(value.decode(errors="replace"))
        return msgspec.convert(found, Reported | None)
    except (ValueError, RecursionError):
        return None


def _cached(details: _Details | None) -> int | None:
    return None if details is None else details.cached_tokens
