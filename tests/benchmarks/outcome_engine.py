"""One engine of `make bench-outcome`: kvplug.sim.engine, fit to share cores with a router.

usage: python -m tests.benchmarks.outcome_engine --tokenize-s-per-byte S [kvplug.sim.engine's flags]

In:  the command line.   Out: the same engine, but for three things:

* Tokenizing takes the time that it takes, and no core: an engine has a machine of its own.
* `/v1/completions/render` and the same of chats are there, as in vLLM 0.32: vllm-router asks them.
* Events have vLLM's fields and no others, and what has its default is left out, as there:
  vllm-router refuses a whole batch for a field that it does not know.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web

from kvplug.errors import KvplugError
from kvplug.events import EventBatch
from kvplug.sim import engine_service, publishing
from kvplug.sim.api import Api
from kvplug.sim.completions import json_object
from kvplug.sim.engine_config import SimConfig, parse
from kvplug.sim.ranks import Ranks
from kvplug.sim.tokenizer import FolderTokenizer, Tokenizer
from kvplug.wire import Stored, to_wire
from tests.benchmarks.outcome_text import WordTokenizer

_FIELDS: Final = Stored.__struct_fields__
STOCK_FIELDS: Final = frozenset(("type", *_FIELDS[: _FIELDS.index("cache_salt")]))
OMITTED_IF_NONE: Final = frozenset(
    ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
)


class SlowApi(Api):
    """The routes, with the time that tokenizing takes."""

    def __init__(
        self,
        config: SimConfig,
        ranks: Ranks,
        tokenizer: Tokenizer,
        event_sources: Mapping[str, Mapping[str, object]],
        *,
        tokenize_s_per_byte: float,
    ) -> None:
        super().__init__(config, ranks, tokenizer, event_sources)
        self._s_per_byte = tokenize_s_per_byte
        self.application.add_routes(
            [
                web.post("/v1/completions/render", self.render),
                web.post("/v1/chat/completions/render", self.render),
            ]
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat."""
        await self._tokenizing(request)
        return await super().generate(request)

    async def tokenize(self, request: web.Request) -> web.Response:
        """The token ids of a prompt, or of messages."""
        await self._tokenizing(request)
        return await super().tokenize(request)

    async def render(self, request: web.Request) -> web.Response:
        """The tokens of a request, as vLLM's GenerateRequest."""
        await self._tokenizing(request)
        body = json_object(await request.read())
        is_chat = "messages" in body
        rendered = [
            {
                "request_id": f"render-{number}",
                "token_ids": tokens,
                "features": None,
                "sampling_params": {"max_tokens": body.get("max_tokens")},
                "model": body.get("model"),
                "stream": body.get("stream", False),
            }
            for number, tokens in enumerate(self._reader.prompts(body, is_chat=is_chat))
        ]
        answer = msgspec.json.encode(rendered[0] if is_chat else rendered)
        return web.Response(body=answer, content_type="application/json")

    async def _tokenizing(self, request: web.Request) -> None:
        raw = await request.read()  # kept by the request
        if b'"prompt":[' not in raw[:200]:
            await asyncio.sleep(len(raw) * self._s_per_byte)


class StockCodec:
    """What the service asks a codec for."""

    @staticmethod
    def encode(batch: EventBatch) -> bytes:
        """As vLLM 0.32 writes it, and no field more."""
        wires = [stock_event(msgspec.to_builtins(to_wire(event))) for event in batch.events]
        return msgspec.msgpack.encode((batch.ts, wires, batch.dp_rank))


def stock_event(event: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event that stock vLLM writes."""
    return {
        name: value
        for name, value in event.items()
        if name in STOCK_FIELDS and not (value is None and name in OMITTED_IF_NONE)
    }


def _replace(module: ModuleType, name: str, stand_in: object) -> None:
    if name not in vars(module):  # it has moved: the peers would get what they refuse
        raise AttributeError(f"{module.__name__} uses no {name}")
    vars(module)[name] = stand_in


def main() -> int:
    """Serve until a signal; returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tokenize-s-per-byte", type=float, required=True)
    own, rest = parser.parse_known_args()
    config, _ = parse(rest)
    assert config.tokenizer is not None
    _replace(publishing, "codec", StockCodec)
    slow = partial(SlowApi, tokenize_s_per_byte=own.tokenize_s_per_byte)
    _replace(engine_service, "Api", slow)
    tokenizer = FolderTokenizer(WordTokenizer(config.tokenizer), config.tokenizer)
    try:
        uvloop.run(engine_service.serve(config, tokenizer))
    except KvplugError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
