"""Generated tokens to the answers of OpenAI's API.

In:  an Ask, its requests and their text.   Out: JSON bodies, and chunks of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import msgspec

from kvplug.sim.prompts import Ask
from kvplug.sim.request import Request

Json = dict[str, Any]
STREAM_END = b"data: [DONE]\n\n"
_numbers = count()


def usage(requests: Iterable[Request]) -> Json:
    """Tokens of the prompts, how many of them were cached, and tokens of the answers."""
    requests = list(requests)
    num_prompt = sum(request.num_prompt_tokens for request in requests)
    num_output = sum(request.num_output_tokens for request in requests)
    num_cached = sum(request.num_cached_tokens or 0 for request in requests)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class Reply:
    """The answer to one Ask: whole(), or chunk() by chunk()."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        prefix = "chatcmpl" if ask.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{next(_numbers):032x}",
            "created": int(time.time()),
            "model": ask.model,
        }
        self._opening = b""
        if ask.is_chat:
            self._opening = self._event(
                [self._delta(0, {"role": "assistant", "content": ""}, None)]
            )

    def whole(self, texts: Sequence[str], requests: Sequence[Request]) -> Json:
        """Without streaming."""
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        choices = [self._choice(i, text, "length") for i, text in enumerate(texts)]
        return {**self._head, "object": kind, "choices": choices, "usage": usage(requests)}

    def chunk(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """One token of a stream; in a chat the role goes out with the first one, as in vLLM."""
        if not self._ask.is_chat:
            return self._event([self._completion(index, text, finish_reason)])
        opening, self._opening = self._opening, b""
        return opening + self._event([self._delta(index, {"content": text}, finish_reason)])

    def closing(self, requests: Sequence[Request]) -> bytes:
        """What a stream ends with: the usage, if it was asked for."""
        if not self._ask.includes_usage:
            return STREAM_END
        return self._event([], usage=usage(requests)) + STREAM_END

    def _event(self, choices: list[Json], **more: object) -> bytes:
        kind = "chat.completion.chunk" if self._ask.is_chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, **more}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        if not self._ask.is_chat:
            return self._completion(index, text, finish_reason)
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "finish_reason": finish_reason}

    @staticmethod
    def _completion(index: int, text: str, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    @staticmethod
    def _delta(index: int, delta: Json, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
