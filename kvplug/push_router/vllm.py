"""VllmClient: tokens from vLLM's OpenAI server.

In:  a GenerateRequest.   Out: tokens, by POST /v1/completions with `return_token_ids` (vLLM 0.10.2
and later; tests/engines/test_vllm_push_router.py runs it against 0.32).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec

from kvplug.errors import WorkerLostError
from kvplug.events import Rank
from kvplug.push_router.client import Output
from kvplug.push_router.http_client import HttpClient, decoded, error_of
from kvplug.push_router.request import GenerateRequest

# Of an engine that shuts down; the answer has not ended.
_BROKEN = frozenset(("abort", "error"))


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


class VllmClient(HttpClient):
    """A WorkerClient of vLLM; `async with` opens and closes it."""

    path: ClassVar[str] = "/v1/completions"

    async def generate(self, rank: Rank, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """As WorkerClient.generate."""
        async with aclosing(self._events(rank, _body(request), request.dp_rank)) as events:
            async for event in events:
                for output in _outputs(rank, decoded(rank, event, _decoder)):
                    yield output


def _outputs(rank: Rank, event: _Event) -> list[Output]:
    if event.error is not None:
        raise error_of(rank, event.error.code or 500, event.error.message)
    outputs = [Output(each.token_ids or (), each.finish_reason) for each in event.choices]
    for output in outputs:
        if output.finish_reason in _BROKEN:
            raise WorkerLostError(f"{rank} broke off its answer: {output.finish_reason}")
    return outputs


def _body(request: GenerateRequest) -> dict[str, Any]:
    stop = request.stop_conditions
    body: dict[str, Any] = {
        "prompt": request.token_ids,
        "stream": True,
        "return_token_ids": True,
        "max_tokens": stop.max_tokens,
        "min_tokens": stop.min_tokens,
        "ignore_eos": stop.ignore_eos,
        "stop": stop.stop,
        "stop_token_ids": stop.stop_token_ids,
        **request.sampling_options.given(),
    }
    if model := request.namespace.lora_name or request.model:
        body["model"] = model
    if request.namespace.salt:
        body["cache_salt"] = request.namespace.salt
    return body
