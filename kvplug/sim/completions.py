"""Completions and chats of OpenAI's API: what a simulated engine is asked for, and its answers.

In:  the JSON body of /v1/completions or /v1/chat/completions.   Out: Ask, or an ApiError.
In:  an Ask, its requests and their text.   Out: JSON bodies, and chunks of a stream.

What shapes the answer's text (temperature, stop, logprobs and so on) is read over: there is no
model. What would change how much is generated (`n`, `best_of`) is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from kvplug.api_errors import ApiError
from kvplug.errors import TokenizerError
from kvplug.sim.request import Request
from kvplug.sim.tokenizer import Body, Tokenizer
from kvplug.vllm_hashes import Lora

Json = dict[str, Any]
STREAM_END = b"data: [DONE]\n\n"
_numbers = count()
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, and vLLM's


def vllm_error(status: int, message: str) -> ApiError:
    """An error as vLLM's server says it: with the status as its code, and types of its own."""
    kind = "BadRequestError" if status == 400 else "NotFoundError"
    return ApiError(status, message, code=status, kind=kind)


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a body."""

    include_usage: bool = False


class _Fields(msgspec.Struct, frozen=True):
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    n: int | None = None
    best_of: int | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One or several prompts, each to be answered by max_tokens tokens."""

    model: str
    lora: Lora | None
    prompts: tuple[Sequence[int], ...]
    max_tokens: tuple[int, ...]
    salt: str
    is_chat: bool
    is_stream: bool
    includes_usage: bool
    returns_token_ids: bool = False


class AskReader:
    """Knows the tokenizer, the models and the longest request."""

    def __init__(
        self, tokenizer: Tokenizer, models: Mapping[str, Lora | None], max_model_len: int
    ) -> None:
        self._tokenizer, self._models, self._max_model_len = tokenizer, models, max_model_len

    def read(self, raw: bytes, *, is_chat: bool) -> Ask:
        """The body of a completion or a chat."""
        body = json_object(raw)
        fields = _fields(body)
        model = self._model(fields.model)
        prompts = self.prompts(body, is_chat=is_chat)
        return Ask(
            model=model,
            lora=self._models[model],
            prompts=prompts,
            max_tokens=tuple(self._max_tokens(fields, prompt, is_chat) for prompt in prompts),
            salt=fields.cache_salt or "",
            is_chat=is_chat,
            is_stream=fields.stream,
            includes_usage=bool(fields.stream_options and fields.stream_options.include_usage),
            returns_token_ids=fields.return_token_ids,
        )

    def prompts(self, body: Body, *, is_chat: bool) -> tuple[Sequence[int], ...]:
        """Token ids of the body's prompts."""
        try:
            if is_chat:
                return (self._tokenizer.chat(body),)
            return tuple(self._tokenizer.completion(body))
        except TokenizerError as error:
            raise vllm_error(400, str(error)) from error

    def _model(self, name: str | None) -> str:
        model = next(iter(self._models)) if name is None else name
        if model not in self._models:
            raise vllm_error(404, f"The model `{model}` does not exist.")
        return model

    def _max_tokens(self, fields: _Fields, prompt: Sequence[int], is_chat: bool) -> int:
        """The number asked for; by default 16 for a completion, and all that fits for a chat."""
        num_left = self._max_model_len - len(prompt)
        asked = fields.max_tokens
        if is_chat and fields.max_completion_tokens is not None:
            asked = fields.max_completion_tokens
        if asked is None:
            asked = num_left if is_chat else _DEFAULT_COMPLETION_TOKENS
        if len(prompt) < 1 or asked < 1 or asked > num_left:
            raise vllm_error(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens; the prompt "
                f"has {len(prompt)} (at least 1) and max_tokens is {asked} (at least 1)",
            )
        return asked


def json_object(raw: bytes) -> dict[str, Any]:
    """The body as a dict."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise vllm_error(400, f"the body must be a JSON object: {error}") from error


def _fields(body: Body) -> _Fields:
    try:
        fields = msgspec.convert(body, _Fields)
    except msgspec.ValidationError as error:
        raise vllm_error(400, f"the body does not fit: {error}") from error
    if (fields.n or 1) != 1 or (fields.best_of or 1) != 1:
        raise vllm_error(400, "n and best_of must be 1: a simulated engine answers once")
    return fields


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
        self._opening, self._has_prompt_ids = b"", set[int]()
        if ask.is_chat:
            self._opening = self._event(
                [self._delta(0, {"role": "assistant", "content": ""}, None)], **self._prompt_ids(0)
            )

    def whole(self, texts: Sequence[str], requests: Sequence[Request]) -> Json:
        """Without streaming."""
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        choices = [self._choice(i, text, "length") for i, text in enumerate(texts)]
        return {**self._head, "object": kind, "choices": choices, "usage": usage(requests)}

    def chunk(self, index: int, text: str, finish_reason: str | None, token_id: int) -> bytes:
        """One token of a stream; in a chat the role goes out with the first one, as in vLLM."""
        ids: Json = {"token_ids": [token_id]} if self._ask.returns_token_ids else {}
        if not self._ask.is_chat:
            ids |= self._prompt_ids(index)
            return self._event([{**self._completion(index, text, finish_reason), **ids}])
        opening, self._opening = self._opening, b""
        return opening + self._event([self._delta(index, {"content": text}, finish_reason) | ids])

    def _prompt_ids(self, index: int) -> Json:
        """With the first chunk of each prompt, if they are asked for, as in vLLM."""
        if not self._ask.returns_token_ids or index in self._has_prompt_ids:
            return {}
        self._has_prompt_ids.add(index)
        return {"prompt_token_ids": list(self._ask.prompts[index])}

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
