"""A stream that goes on at another worker: what is known of it, what to ask for, how it reads.

In:  the fields of a body, the events of the answer so far.   Out: a body for the rest, and the
rest's events in the form of the first ones.

A request is continued as a completion of the prompt's token ids and the generated ones, which vLLM
says since 0.10.2 if it is asked to (`return_token_ids`). That is exact only where the engine does
nothing else with the answer than to draw tokens and turn them into text, so only bodies are
continued whose fields are all known to be like that. Tokens whose text has not come are generated
again: they may be the first bytes of a character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvplug.server.proxy.additions import TOKEN_IDS

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "min_tokens": (0,),
}
"""These are continued only with these values, or null."""
_SAMPLING: Final = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos"),
        *("stop_token_ids", "cache_salt", "priority", "user", "skip_special_tokens"),
    )
)
_LENGTHS: Final = ("max_completion_tokens", "max_tokens")
_OTHERS: Final = frozenset(("model", "messages", "prompt", "stream", "stream_options", *_LENGTHS))
_EMPTY_TEXT: Final = re.compile(rb'"(?:content|text)": ?""|"delta": ?\{\}')
_ODD_DELTA: Final = re.compile(rb'"(?:reasoning\w*|tool_calls|refusal)": ?["{[]')
_FINISHED: Final = re.compile(rb'"finish_reason": ?"')
_USAGE_CHUNK: Final = re.compile(rb'"choices": ?\[\][^\n]*"usage": ?\{')
_UNSEEN: Final = ("prompt_token_ids", "token_ids")
_OF_CHATS: Final = ("logprobs", "finish_reason", "stop_reason")
_DONE: Final = b"data: [DONE]\n\n"
PATH: Final = "/v1/completions"


class Continuation:
    """note each piece of the first answer; then rest, and reshaped for each piece of the others."""

    def __init__(self, body: Mapping[str, Any], *, is_chat: bool, longest: int | None) -> None:
        """`longest`: tokens of prompt and answer, if the body does not say how many it wants."""
        self._body, self._is_chat, self._longest = body, is_chat, longest
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._num_with_text = 0
        self._head: dict[str, Any] = {}
        self._is_exact, self._has_finished, self._has_usage = True, False, False

    def note(self, events: bytes) -> None:
        """Whole events as the engine sent them."""
        if not self._head and b"data: {" in events:
            self._head = _head_of(events)
            self._is_exact = bool(self._head)
        for is_prompt, ids in TOKEN_IDS.findall(events):
            if not is_prompt:
                self._tokens += _ids(ids)
            elif ids:
                self._prompt = _ids(ids)
        if _ODD_DELTA.search(events):
            self._is_exact = False
        self._has_finished |= _FINISHED.search(events) is not None
        self._has_usage |= _USAGE_CHUNK.search(events) is not None
        if events.count(b"\n\n") > 1 or _EMPTY_TEXT.search(events) is None:
            self._num_with_text = self._num_of_text(events)

    def _num_of_text(self, events: bytes) -> int:
        """Of several events, the last ones may have no text."""
        num = len(self._tokens)
        for event in reversed(events.split(b"\n\n")):
            if _EMPTY_TEXT.search(event):
                num -= sum(len(_ids(ids)) for prompt, ids in TOKEN_IDS.findall(event) if not prompt)
            elif b'"finish_reason"' in event:
                break
        return num

    @property
    def tokens(self) -> list[int]:
        """The prompt, and what is generated of the answer."""
        return self._prompt + self._tokens[: self._num_with_text]

    @property
    def num_left(self) -> int | None:
        """How many tokens of the answer are left; None if it cannot be continued exactly."""
        if not (self._is_exact and self._prompt and self._num_with_text and self._head):
            return None
        asked = next((self._body[name] for name in _LENGTHS if self._body.get(name)), None)
        if asked is None and self._is_chat and self._longest is not None:
            asked = self._longest - len(self._prompt)
        return None if asked is None else asked - self._num_with_text

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the stream is missing."""
        return self._has_finished or (self.num_left is not None and self.num_left <= 0)

    def closing(self) -> bytes:
        """The end of a complete stream."""
        choice = self._choice({"index": 0, "text": "", "logprobs": None, "finish_reason": "length"})
        end = b"" if self._has_finished else self._chunk([choice])
        options = self._body.get("stream_options") or {}
        if options.get("include_usage") and not self._has_usage:
            end += self._chunk([], usage=self._usage({}))
        return end + _DONE

    def rest(self) -> bytes:
        """A body for what is left."""
        del self._tokens[self._num_with_text :]
        names = _SAMPLING & self._body.keys()
        body = {name: self._body[name] for name in names if self._body[name] is not None}
        if "model" in self._body:
            body["model"] = self._body["model"]
        if options := self._body.get("stream_options"):
            body["stream_options"] = options
        more = {"stream": True, "return_token_ids": True, "max_tokens": self.num_left}
        return msgspec.json.encode({**body, "prompt": self.tokens, **more})

    def reshaped(self, events: bytes) -> bytes:
        """Events of the rest, as the first worker would have sent them."""
        return b"".join(map(self._event, events.split(b"\n\n")[:-1]))

    def _event(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data:").strip()
        if not data.startswith(b"{"):
            return event + b"\n\n"
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return event + b"\n\n"
        if "choices" not in chunk:  # an error
            return event + b"\n\n"
        choices = [self._choice(each) for each in chunk["choices"]]
        usage = chunk.get("usage")
        self._has_usage |= bool(usage) and not choices
        return self._chunk(choices, **({"usage": self._usage(usage)} if usage else {}))

    def _chunk(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        body = {**self._head, "choices": choices, **more}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        self._tokens += choice.get("token_ids") or []
        self._has_finished |= choice.get("finish_reason") is not None
        if choice.get("text"):
            self._num_with_text = len(self._tokens)
        if not self._is_chat:
            return {name: None if name in _UNSEEN else choice[name] for name in choice}
        shown = {name: choice[name] for name in choice if name in _OF_CHATS}
        unseen = {"token_ids": None} if "token_ids" in choice else {}
        return {"index": 0, "delta": {"content": choice.get("text", "")}, **shown, **unseen}

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Of the whole; what was cached of the prompt only its first worker knows."""
        num_prompt, num_tokens = len(self._prompt), len(self._tokens)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
        details = {"prompt_tokens_details": None} if "prompt_tokens_details" in usage else {}
        return {**counts, "total_tokens": num_prompt + num_tokens, **details}

    @property
    def num_tokens(self) -> int:
        """Of the answer so far."""
        return len(self._tokens)


def is_continued(body: Mapping[str, Any]) -> bool:
    """Whether an answer to such a body can go on at another worker, if it breaks off."""
    if body.get("stream") is not True or "return_token_ids" in body:
        return False
    if isinstance(prompt := body.get("prompt", ""), list) and not all(
        type(each) is int for each in prompt
    ):
        return False
    messages = body.get("messages", [])
    if not isinstance(messages, list) or not all(map(_is_text, messages)):
        return False
    return all(_is_known(name, value) for name, value in body.items())


def _is_text(message: object) -> bool:
    """Images are no tokens that another worker could be sent."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return isinstance(content, str)


def _is_known(name: str, value: object) -> bool:
    if name in _NEUTRAL:
        # 0 is not False: completions with `logprobs: 0` have those of the tokens themselves.
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in _NEUTRAL[name]
        )
    return name in _SAMPLING or name in _OTHERS


def _head_of(events: bytes) -> dict[str, Any]:
    """What all chunks have in common."""
    data = events[events.index(b"data: {") + 6 :].partition(b"\n")[0]
    try:
        chunk = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
    return {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}


def _ids(digits: bytes) -> list[int]:
    return [int(each) for each in digits.split(b",")] if digits.strip() else []
