"""The clients of vLLM and SGLang, against servers that answer as those do or should not."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from kvplug import Namespace, Rank
from kvplug.errors import ConfigError, RequestRefusedError, WorkerLostError
from kvplug.push_router import (
    GenerateRequest,
    Output,
    SamplingOptions,
    SglangClient,
    StopConditions,
    VllmClient,
)
from tests.waiting import until

REQUEST = GenerateRequest(
    token_ids=[1, 2, 3],
    model="m",
    namespace=Namespace("adapter", "salt"),
    stop_conditions=StopConditions(max_tokens=5, stop=("x",)),
    sampling_options=SamplingOptions(temperature=0.0, seed=4),
    dp_rank=1,
)
RANK = Rank("engine", 1)


class Server:
    """Answers any POST with `parts`, and then breaks the connection or ends the answer."""

    def __init__(self):
        self.parts, self.status, self.breaks, self.waits = [], 200, False, False
        self.bodies, self.headers, self.is_left = [], [], False

    async def handle(self, request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for part in self.parts:
            await response.write(part)
        try:
            if self.waits:
                await asyncio.Event().wait()
        finally:
            self.is_left = self.waits
        if self.breaks:
            request.transport.abort()
        return response

    @asynccontextmanager
    async def running(self, client_kind, **settings):
        application = web.Application()
        application.router.add_post("/{path:.*}", self.handle)
        # A handler hears of it when its client leaves, as in an engine's server.
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        urls = {RANK.worker: f"http://127.0.0.1:{port}/"}
        try:
            async with client_kind(urls, **settings) as client:
                yield client
        finally:
            await runner.cleanup()


@pytest.fixture
def server():
    return Server()


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def of_vllm(token_ids, finish_reason=None):
    return event(choices=[{"index": 0, "token_ids": token_ids, "finish_reason": finish_reason}])


def of_sglang(output_ids, num_tokens, reason=None):
    finish_reason = None if reason is None else {"type": reason, "length": num_tokens}
    meta_info = {"completion_tokens": num_tokens, "finish_reason": finish_reason, "id": "x"}
    return event(text="...", output_ids=output_ids, meta_info=meta_info)


async def outputs_of(client, seen=None):
    outputs = [] if seen is None else seen
    async for output in client.generate(RANK, REQUEST):
        outputs.append(output)
    return [Output(list(output.token_ids), output.finish_reason) for output in outputs]


async def test_vllm_is_asked_for_token_ids(server):
    server.parts = [of_vllm([7, 8]), b": ping\n\n", of_vllm([9], "length"), DONE]
    async with server.running(VllmClient, api_key="key") as client:
        assert await outputs_of(client) == [Output([7, 8]), Output([9], "length")]
    assert server.bodies == [
        {
            **{"prompt": [1, 2, 3], "stream": True, "return_token_ids": True, "max_tokens": 5},
            **{"min_tokens": 0, "ignore_eos": False, "stop": ["x"], "stop_token_ids": []},
            **{"temperature": 0.0, "seed": 4, "model": "adapter", "cache_salt": "salt"},
        }
    ]
    assert server.headers[0]["X-data-parallel-rank"] == "1"
    assert server.headers[0]["Authorization"] == "Bearer key"


async def test_sglang_is_asked_for_token_ids(server):
    server.parts = [of_sglang([7, 8], 2), of_sglang([7, 8, 9], 3, "stop"), DONE]
    async with server.running(SglangClient) as client:
        assert await outputs_of(client) == [Output([7, 8]), Output([9], "stop")]
    sampling = {
        **{"temperature": 0.0, "sampling_seed": 4, "max_new_tokens": 5, "min_new_tokens": 0},
        **{"ignore_eos": False, "stop": ["x"], "stop_token_ids": []},
    }
    assert server.bodies == [
        {
            **{"input_ids": [1, 2, 3], "stream": True, "sampling_params": sampling},
            **{"routed_dp_rank": 1, "lora_path": "adapter", "cache_salt": "salt"},
        }
    ]


async def test_sglang_may_send_only_what_is_new(server):
    server.parts = [of_sglang([7], 1), of_sglang([8, 9], 3), of_sglang([1], 4, "length"), DONE]
    async with server.running(SglangClient) as client:
        assert [each.token_ids for each in await outputs_of(client)] == [[7], [8, 9], [1]]


async def test_sglang_may_have_more_tokens_than_it_has_counted(server):
    server.parts = [of_sglang([7, 8], 1), of_sglang([7, 8, 9], 3, "length"), DONE]
    async with server.running(SglangClient) as client:
        assert [each.token_ids for each in await outputs_of(client)] == [[7, 8], [9]]


async def test_sglang_that_skips_tokens_is_lost(server):
    server.parts = [of_sglang([7], 1), of_sglang([9], 3)]
    async with server.running(SglangClient) as client:
        with pytest.raises(WorkerLostError, match=r"lost tokens .* expected 2 new ones, got 1"):
            await outputs_of(client)


CLIENTS = [(VllmClient, of_vllm([7])), (SglangClient, of_sglang([7], 1))]


@pytest.mark.parametrize(("kind", "first"), CLIENTS)
async def test_events_may_come_in_any_parts(server, kind, first):
    long = b"data: " + b" " * 300_000 + first.removeprefix(b"data: ")
    stream = (first + long).replace(b"\n", b"\r\n")
    server.parts = [stream[at : at + 70_000] for at in range(0, len(stream), 70_000)]
    seen = []
    async with server.running(kind) as client:
        await outputs_of(client, seen)
    assert list(seen[0].token_ids) == [7]
    assert len(seen) == 2


@pytest.mark.parametrize(("kind", "first"), CLIENTS)
async def test_a_connection_that_breaks_is_a_lost_worker(server, kind, first):
    server.parts, server.breaks, seen = [first], True, []
    async with server.running(kind) as client:
        with pytest.raises(WorkerLostError, match="the connection to engine#1 failed"):
            await outputs_of(client, seen)
    assert [list(output.token_ids) for output in seen] in ([[7]], [])


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
async def test_a_worker_that_is_not_there_is_lost(kind):
    async with kind({RANK.worker: "http://127.0.0.1:9"}) as client:
        with pytest.raises(WorkerLostError, match="engine#1"):
            await outputs_of(client)


@pytest.mark.parametrize(("kind", "first"), CLIENTS)
async def test_a_silent_worker_is_lost(server, kind, first):
    server.parts, server.waits, seen = [first], True, []
    async with server.running(kind, read_timeout_s=0.05) as client:
        with pytest.raises(WorkerLostError):
            await outputs_of(client, seen)
    assert len(seen) == 1


@pytest.mark.parametrize(("kind", "first"), CLIENTS)
async def test_a_closed_generator_leaves_the_engine(server, kind, first):
    server.parts, server.waits = [first], True
    async with server.running(kind) as client:
        async with aclosing(client.generate(RANK, REQUEST)) as outputs:
            assert list((await anext(outputs)).token_ids) == [7]
        await until(lambda: server.is_left, "the server noticed")


STATUSES = [
    (400, RequestRefusedError),
    (404, RequestRefusedError),
    (408, WorkerLostError),
    (429, WorkerLostError),
    (500, WorkerLostError),
    (503, WorkerLostError),
]


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
@pytest.mark.parametrize(("status", "error"), STATUSES)
async def test_a_status_says_whose_fault_it_is(server, kind, status, error):
    server.status, server.parts = status, [b"because " + b"x" * 9000]
    async with server.running(kind) as client:
        with pytest.raises(error, match=f"engine#1 answered with status {status}: because x+$"):
            await outputs_of(client)


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
@pytest.mark.parametrize(("status", "error"), [*STATUSES, (None, WorkerLostError)])
async def test_an_error_in_the_stream_says_it_too(server, kind, status, error):
    server.parts = [event(error={"message": "no more", "type": "T", "code": status}), DONE]
    async with server.running(kind) as client:
        with pytest.raises(error, match="no more"):
            await outputs_of(client)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_vllm_that_shuts_down_is_lost(server, reason):
    server.parts = [of_vllm([7]), of_vllm([], reason), DONE]
    async with server.running(VllmClient) as client:
        with pytest.raises(WorkerLostError, match=reason):
            await outputs_of(client)


@pytest.mark.parametrize(("status", "error"), [(400, RequestRefusedError), (None, WorkerLostError)])
async def test_sglang_that_aborts_says_why(server, status, error):
    reason = {"type": "abort", "message": "enough", "status_code": status}
    meta_info = {"completion_tokens": 1, "finish_reason": reason}
    server.parts = [of_sglang([7], 1), event(output_ids=[7], meta_info=meta_info), DONE]
    async with server.running(SglangClient) as client:
        with pytest.raises(error, match="enough"):
            await outputs_of(client)


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
@pytest.mark.parametrize("data", [b"no json", b"[1]", b'{"choices": 3, "output_ids": 3}'])
async def test_what_is_not_understood_is_a_lost_worker(server, kind, data):
    server.parts = [b"data: " + data + b"\n\n"]
    async with server.running(kind) as client:
        with pytest.raises(WorkerLostError, match="not understood"):
            await outputs_of(client)


@pytest.mark.parametrize("limit", [0, -1.0, None, "5"])
@pytest.mark.parametrize("name", ["connect_timeout_s", "read_timeout_s"])
def test_limits_are_above_0(name, limit):
    with pytest.raises(ConfigError, match=name):
        VllmClient(**{name: limit})
