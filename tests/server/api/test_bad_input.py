"""Bodies that make no sense: one clear sentence, never a failure of the router."""

import itertools
import json

import pytest

from examples.launch.engine_env import ensure_tiny_tokenizer
from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.config import TokenizerFolder
from tests.server.engine import Engine
from tests.server.test_service import routing

ODD = [
    *(None, True, 0, -1, 1.5, 1e308, 2**63, -(2**63), 2**64, 10**400, "", "x" * 1000, "\ud7ff\x00"),
    *([], {}, [[]], [{}], [None], [1, "a"], ["a", 1], [[1], "a"], [[[[1]]]], {"a": {"b": []}}),
    *([-1], [2**32], [1.5], [True], [10**400], [[2**40]]),
    *([{"role": "user"}], [{"role": 5, "content": 5}], [{"content": [{"type": "image_url"}]}]),
    *([{"role": "user", "content": [{"type": "text", "text": None}]}], {"role": "user"}),
]
FIELDS = [
    *("model", "prompt", "messages", "input", "instructions", "system", "tools", "tool_choice"),
    *("stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "n"),
    *("best_of", "echo", "logprobs", "cache_salt", "extra_key", "lora_path", "prompt_embeds"),
    *("session_params", "session_id", "user", "previous_response_id", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "documents", "reasoning", "metadata"),
    *("add_special_tokens", "truncate_prompt_tokens", "chat_template", "response_format", "text"),
]
GOOD = {
    "/v1/completions": {"prompt": "once"},
    "/v1/responses": {"input": "once"},
}
CHAT = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 4}
RAW = [
    b"",
    b"null",
    b"[]",
    b'"a"',
    b"5",
    b"{",
    b"{]",
    b'{"model": "m", }',
    b'{"model": NaN}',
    b'{"model": "\\ud800"}',
    b'{"model": "\xff"}',
    b'\xef\xbb\xbf{"model": "m"}',
    b"\x00" * 100,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "m", "prompt": ' + b"[" * 200_000,
    b'{"model": "m", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "m", "n": ' + b"9" * 100_000 + b"}",
    b'{"model": "m", "model": "x", "model": 5}',
    b'{"' + b"a" * 200_000 + b'": 1}',
    b'{"model": "m", ' + b",".join(b'"f%d": 1' % n for n in range(20_000)) + b"}",
]


async def statuses(client, bodies):
    for path, body in bodies:
        headers = {"Content-Type": "application/json"}
        async with client.post(path, data=body, headers=headers) as response:
            answer = await response.read()
            yield path, body, response.status, answer


@pytest.mark.slow
async def test_no_value_of_any_field_makes_the_router_fail():
    folder = TokenizerFolder(ensure_tiny_tokenizer())
    paths = [each.path for each in ENDPOINTS if each.kind is not None]
    async with routing(Engine(), tokenizers=(folder,)) as (service, client):
        bodies = (
            (path, json.dumps({"model": "m", **GOOD.get(path, CHAT), field: value}))
            for path, field, value in itertools.product(paths, FIELDS, ODD)
        )
        async for path, body, status, answer in statuses(client, bodies):
            assert status in (200, 400, 404), (path, body, status, answer)
        assert len(service.router.load) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/rerank"])
async def test_what_is_no_object_is_refused_with_a_sentence(path):
    async with routing(Engine()) as (service, client):
        async for _, body, status, answer in statuses(client, [(path, raw) for raw in RAW]):
            assert status in (200, 400, 404), (body[:50], status, answer)
            if status != 200:
                message = json.loads(answer)["error"]["message"]
                assert 10 < len(message) < 1000
                assert "\n" not in message
        assert len(service.router.load) == 0
