"""SglangClient: tokens from SGLang's own server.

In:  a GenerateRequest.   Out: tokens, by POST /generate with `input_ids` (SGLang 0.5.23;
tests/engines/test_sglang_push_router.py runs it).

An event has all tokens so far, or with `--incremental-streaming-output` only the new ones; its
`completion_tokens` tells which.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec

from kvplug.errors import WorkerLostError
from kvplug.events import Rank
from kvplug.push_router.client import Output
from kvplug.push_router.http_client import HttpClient, decoded, error_of
from kvplug.push_router.request import GenerateRequest


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _FinishReason | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _MetaInfo = msgspec.field(default_factory=_MetaInfo)
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


class SglangClient(HttpClient):
    """A WorkerClient of SGLang; `async with` opens and closes it."""

    path: ClassVar[str] = "/generate"

    async def generate(self, rank: Rank, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """As WorkerClient.generate."""
        num_seen = 0
        async with aclosing(self._events(rank, _body(request), None)) as events:
            async for data in events:
                event = decoded(rank, data, _decoder)
                _require_whole(rank, event)
                token_ids = _new_tokens(rank, event, num_seen)
                num_seen += len(token_ids)
                reason = event.meta_info.finish_reason
                yield Output(token_ids, None if reason is None else reason.type)


def _require_whole(rank: Rank, event: _Event) -> None:
    if event.error is not None:
        raise error_of(rank, event.error.code or 500, event.error.message)
    reason = event.meta_info.finish_reason
    if reason is not None and reason.type == "abort":
        raise error_of(rank, reason.status_code or 500, reason.message or "aborted")


def _new_tokens(rank: Rank, event: _Event, num_seen: int) -> Sequence[int]:
    num_tokens, token_ids = event.meta_info.completion_tokens, event.output_ids
    if len(token_ids) >= num_tokens:  # all of them; more may have come since they were counted
        return token_ids[num_seen:]
    if num_seen + len(token_ids) != num_tokens:
        raise WorkerLostError(
            f"{rank} lost tokens of its answer: expected {num_tokens - num_seen} new ones, "
            f"got {len(token_ids)}"
        )
    return token_ids


def _body(request: GenerateRequest) -> dict[str, Any]:
    stop, sampling = request.stop_conditions, request.sampling_options.given()
    if "seed" in sampling:
        sampling["sampling_seed"] = sampling.pop("seed")
    sampling |= {
        "max_new_tokens": stop.max_tokens,
        "min_new_tokens": stop.min_tokens,
        "ignore_eos": stop.ignore_eos,
        "stop": stop.stop,
        "stop_token_ids": stop.stop_token_ids,
    }
    body: dict[str, Any] = {
        "input_ids": request.token_ids,
        "stream": True,
        "sampling_params": sampling,
    }
    if request.dp_rank is not None:
        body["routed_dp_rank"] = request.dp_rank
    if request.namespace.lora_name:
        body["lora_path"] = request.namespace.lora_name
    if request.namespace.salt:
        body["cache_salt"] = request.namespace.salt
    return body
