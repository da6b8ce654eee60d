"""Engines of `make bench-service` that cost next to nothing: what is measured is the router.

usage: python -m tests.benchmarks.service_engine --step-s S --tokenizer DIR
           --engine PORT:EVENTS_PORT:REPLAY_PORT [--engine ...]

In:  the ports of each engine.   Out: completions of `max_tokens` chunks, from one process.

A request gets its first chunk at once and one more in each step, as from an engine that decodes a
batch: all streams of an engine move together, and each chunk is a write of its own. HTTP is read
with a search for the end of the head. `/v1/completions/render` tokenizes, each prompt once:
vllm-router 0.1.17 asks all engines at the same time and takes the first answer, and here they share
a core. Each engine publishes one stored block, and answers replays.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

import msgspec
import uvloop
from tokenizers import Tokenizer

from examples.launch.endpoint import LOOPBACK
from examples.launch.engine_server import MODEL_NAME
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.events import BlockStored, EventBatch, Namespace
from tests.benchmarks.outcome_engine import StockCodec
from tests.benchmarks.outcome_requests import BLOCK_SIZE

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS: Final = re.compile(rb'"max_tokens": ?(\d+)')
_STREAMS: Final = re.compile(rb'"stream": ?true')


def _choice(text: str, finish: str, usage: str = "") -> str:
    return (
        '{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
        f'"model":"{MODEL_NAME}","choices":[{{"index":0,"text":"{text}","logprobs":null,'
        f'"finish_reason":{finish}}}]{usage}}}'
    )


def _http_chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


_USAGE: Final = ',"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}'
TOKEN: Final = _http_chunk(_choice(" word", "null"))
END: Final = (
    _http_chunk(_choice("", '"length"'))
    + _http_chunk(f'{{"choices":[]{_USAGE}}}')
    + _http_chunk("[DONE]")
    + b"0\r\n\r\n"
)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_MODELS: Final = _whole(
    msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {
                    "id": MODEL_NAME,
                    "object": "model",
                    "created": 0,
                    "owned_by": "vllm",
                    "root": MODEL_NAME,
                    "parent": None,
                    "max_model_len": 131072,
                }
            ],
        }
    )
)


class Decoding:
    """One engine's running streams, and the clock that moves them."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[Connection, int] = {}

    def start(self, connection: Connection, num_tokens: int) -> None:
        """The first token at once, the others step by step."""
        connection.transport.write(STREAM_HEAD + TOKEN)
        if not self._left:
            asyncio.get_running_loop().call_later(self._step_s, self._step)
        self._left[connection] = num_tokens - 1

    def stop(self, connection: Connection) -> None:
        """Its client has left."""
        self._left.pop(connection, None)

    def _step(self) -> None:
        for connection, left in list(self._left.items()):
            if left > 0:
                connection.transport.write(TOKEN)
                self._left[connection] = left - 1
            else:
                del self._left[connection]
                connection.transport.write(END)
        if self._left:
            asyncio.get_running_loop().call_later(self._step_s, self._step)


class Connection(asyncio.Protocol):
    """One connection to an engine; requests come one after another."""

    transport: asyncio.Transport

    def __init__(self, decoding: Decoding, render: Callable[[bytes], bytes]) -> None:
        self._decoding, self._render = decoding, render
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A router connects."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Answer when a request is whole."""
        self._received += data
        while (end := self._received.find(_HEAD_END)) >= 0:
            head = bytes(self._received[:end])
            length = int(found[1]) if (found := _LENGTH.search(head)) else 0
            end += len(_HEAD_END)
            if len(self._received) < end + length:
                return
            body = bytes(self._received[end : end + length])
            del self._received[: end + length]
            self._answer(head, body)

    def connection_lost(self, error: Exception | None) -> None:
        """The router leaves."""
        self._decoding.stop(self)

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/v1/completions":
            self._complete(body)
        elif path == b"/v1/completions/render":
            self.transport.write(_whole(self._render(body)))
        elif path == b"/v1/models":
            self.transport.write(_MODELS)
        elif path == b"/health":
            self.transport.write(_whole(b""))
        else:
            self.transport.write(_whole(b"{}", b"404 Not Found"))

    def _complete(self, body: bytes) -> None:
        # What follows the prompt, which is long, is at the end.
        num_tokens = int(found[1]) if (found := _MAX_TOKENS.search(body, len(body) - 300)) else 1
        if _STREAMS.search(body, len(body) - 300):
            self._decoding.start(self, num_tokens)
        else:
            self.transport.write(_whole(_choice(" word", '"length"', _USAGE).encode()))


def _renderer(folder: Path) -> Callable[[bytes], bytes]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @lru_cache(maxsize=256)
    def render(body: bytes) -> bytes:
        request = msgspec.json.decode(body)
        prompt = request["prompt"]
        rendered = {
            "request_id": "render-0",
            "token_ids": tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt,
            "features": None,
            "sampling_params": {"max_tokens": request.get("max_tokens")},
            "model": request.get("model"),
            "stream": request.get("stream", False),
        }
        return msgspec.json.encode([rendered])

    return render


def _published(events_port: int, replay_port: int) -> Publisher:
    config = PublisherConfig(
        endpoint=f"tcp://{LOOPBACK}:{events_port}",
        replay_endpoint=f"tcp://{LOOPBACK}:{replay_port}",
    )
    publisher = Publisher(config, 0, StockCodec.encode, logging.getLogger(__name__), must_bind=True)
    stored = BlockStored(
        block_hashes=(1,),
        token_ids=tuple(range(BLOCK_SIZE)),
        block_size=BLOCK_SIZE,
        namespace=Namespace(),
    )
    publisher.publish(EventBatch(events=(stored,), ts=1.0))
    return publisher


async def _serve(engines: list[list[int]], step_s: float, render: Callable[[bytes], bytes]) -> None:
    loop = asyncio.get_running_loop()
    publishers = []
    for port, events_port, replay_port in engines:
        publishers.append(_published(events_port, replay_port))
        decoding = Decoding(step_s)
        await loop.create_server(
            lambda decoding=decoding: Connection(decoding, render), LOOPBACK, port, backlog=4096
        )
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service_engine")
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--engine", action="append", required=True, metavar="PORT:EVENTS:REPLAY")
    options = parser.parse_args()
    engines = [[int(port) for port in each.split(":")] for each in options.engine]
    uvloop.run(_serve(engines, options.step_s, _renderer(options.tokenizer)))


if __name__ == "__main__":
    main()
