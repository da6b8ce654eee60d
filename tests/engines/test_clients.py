"""The official clients, through the router and without it: the same answers from real vLLM.

A stream is compared by what its chunks add up to: how many tokens vLLM puts into one depends on
when the client reads. Ids and times differ by nature.
"""

import json
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.engines.engine_pool import uses
from tests.engines.engine_start import vllm_server
from tests.waiting import until

MODEL = "tiny-llama"
# A random model writes spaces for as long as a schema lets it.
STRICT = '{"backend": "xgrammar", "disable_any_whitespace": true}'
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FLAGS += ("--structured-outputs-config", STRICT)
pytestmark = uses(vllm_server("vllm-clients", extra_flags=FLAGS))

OF_ONE_ANSWER = {
    *("id", "created", "created_at", "completed_at", "call_id", "item_id", "_request_id"),
    *("sequence_number",),
}
CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 12,
    "temperature": 0,
    "seed": 7,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
STRUCTURED = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
OF_CHATS = {
    "plain": {},
    "several": {"n": 2, "temperature": 1.0},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": ["e"], "max_tokens": 30},
    "tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 60,
    },
    "any_tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 90},
    "structured": {"response_format": STRUCTURED, "max_tokens": 60},
}
COMPLETION = {"model": MODEL, "max_tokens": 8, "temperature": 0, "seed": 7}
# vLLM puts tokens that wait for its HTTP server into one chunk: all of a few on a full machine.
LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
OF_COMPLETIONS = {
    "text": {"prompt": "The capital of France"},
    "ids": {"prompt": list(range(100, 180))},
    "batch": {"prompt": ["One", "Two"]},
    "echo": {"prompt": "The capital", "echo": True, "logprobs": 2},
}
RESPONSE = {"model": MODEL, "input": "Name a town.", "max_output_tokens": 8, "temperature": 0}
MESSAGE = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
MESSAGE |= {"messages": [{"role": "user", "content": "Name a town."}]}


@asynccontextmanager
async def routing(engine):
    worker = WorkerSpec(url=engine.url, events=engine.events_endpoint)
    router = RouterConfig(block_size=32)
    async with RouterService(ServerConfig(workers=(worker,), port=0, router=router)) as service:
        await until(lambda: service.fleet.workers[engine.url].is_up, "the engine is up")
        yield service.url


async def answers(engine, ask):
    """What the engine says itself, and through the router; both with the prompt in its cache."""
    async with routing(engine) as url:
        await ask(engine.url)
        return await ask(engine.url), await ask(url)


def openai_client(url):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_client(url):
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


def plain(value):
    """Without what no two answers share."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in OF_ONE_ANSWER}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


def add(total, part):
    """Texts are joined, lists of deltas too; the last of everything else counts."""
    for name, value in part.items():
        known = total.get(name)
        if name in ("content", "text", "arguments") and isinstance(value, str):
            total[name] = (known or "") + value
        elif name in ("choices", "tool_calls"):
            places = total[name] = known or {}
            for each in value or ():
                add(places.setdefault(each["index"], {}), each)
        elif isinstance(known, dict) and isinstance(value, dict):
            add(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            known += value
        elif value is not None or name not in total:
            total[name] = value
    return total


async def gathered(stream):
    total, num_chunks = {}, 0
    async for chunk in stream:
        num_chunks += 1
        add(total, plain(chunk.model_dump()))
    assert num_chunks > 1
    return total


class TestChat:
    @pytest.mark.parametrize("kind", OF_CHATS)
    async def test_whole(self, engine, kind):
        async def ask(url):
            async with openai_client(url) as client:
                answer = await client.chat.completions.create(**CHAT | OF_CHATS[kind])
                return plain(answer.model_dump())

        direct, routed = await answers(engine, ask)
        assert routed == direct
        assert len(routed["choices"]) == OF_CHATS[kind].get("n", 1)

    @pytest.mark.parametrize("kind", OF_CHATS)
    async def test_streamed(self, engine, kind):
        async def ask(url):
            usage = {"stream_options": {"include_usage": True}}
            async with openai_client(url) as client:
                asked = CHAT | OF_CHATS[kind] | usage
                return await gathered(await client.chat.completions.create(stream=True, **asked))

        direct, routed = await answers(engine, ask)
        assert routed == direct
        assert routed["usage"]["completion_tokens"] > 1
        assert len(routed["choices"]) == OF_CHATS[kind].get("n", 1)

    async def test_a_stream_has_no_usage_that_nobody_asked_for(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                return await gathered(await client.chat.completions.create(stream=True, **CHAT))

        direct, routed = await answers(engine, ask)
        assert routed == direct
        assert routed.get("usage") is None

    async def test_tools_are_called_and_structured_output_is_what_its_schema_allows(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                called = await client.chat.completions.create(**CHAT | OF_CHATS["tool"])
                said = await client.chat.completions.create(**CHAT | OF_CHATS["structured"])
                [call] = called.choices[0].message.tool_calls
                return call.function.name, json.loads(said.choices[0].message.content)

        direct, routed = await answers(engine, ask)
        assert routed == direct
        assert routed[0] == "weather"
        assert routed[1]["city"] in ("Paris", "Rome")


class TestCompletions:
    @pytest.mark.parametrize("kind", OF_COMPLETIONS)
    async def test_whole(self, engine, kind):
        async def ask(url):
            async with openai_client(url) as client:
                answer = await client.completions.create(**COMPLETION | OF_COMPLETIONS[kind])
                return plain(answer.model_dump())

        direct, routed = await answers(engine, ask)
        assert routed == direct

    async def test_streamed(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                asked = COMPLETION | OF_COMPLETIONS["text"] | LONG
                return await gathered(await client.completions.create(stream=True, **asked))

        direct, routed = await answers(engine, ask)
        assert routed == direct


class TestOthers:
    async def test_models(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                return [model.id async for model in client.models.list()]

        direct, routed = await answers(engine, ask)
        assert routed == direct == [MODEL]

    async def test_errors_have_the_engines_status_and_words(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(**CHAT | {"max_tokens": 100_000})
                return caught.value.status_code, caught.value.body

        direct, routed = await answers(engine, ask)
        assert routed == direct

    async def test_a_response(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                return plain((await client.responses.create(**RESPONSE)).model_dump())

        direct, routed = await answers(engine, ask)
        assert routed == direct

    async def test_a_streamed_response(self, engine):
        async def ask(url):
            async with openai_client(url) as client:
                stream = await client.responses.create(stream=True, **RESPONSE)
                events = [event async for event in stream]
                return {event.type for event in events}, events[-1].response.output_text

        direct, routed = await answers(engine, ask)
        assert routed == direct

    async def test_a_message(self, engine):
        async def ask(url):
            async with anthropic_client(url) as client:
                return plain((await client.messages.create(**MESSAGE)).model_dump())

        direct, routed = await answers(engine, ask)
        assert routed == direct

    async def test_a_streamed_message(self, engine):
        async def ask(url):
            async with (
                anthropic_client(url) as client,
                client.messages.stream(**MESSAGE) as stream,
            ):
                return plain((await stream.get_final_message()).model_dump())

        direct, routed = await answers(engine, ask)
        assert routed == direct

    async def test_tokens_of_a_message_are_counted(self, engine):
        asked = {name: MESSAGE[name] for name in ("model", "messages")}

        async def ask(url):
            async with anthropic_client(url) as client:
                return (await client.messages.count_tokens(**asked)).input_tokens

        direct, routed = await answers(engine, ask)
        assert routed == direct > 0
