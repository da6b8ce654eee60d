"""A simulated engine over real sockets."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import zmq.auth

from kvplug import Rank, Router, RouterConfig, codec
from kvplug.errors import ConfigError, TransportError
from kvplug.sim.engine_config import SimConfig, TimeModel
from kvplug.sim.engine_service import EngineService
from kvplug.sim.scheduler import SchedulerConfig
from kvplug.vllm_hashes import Lora
from tests.waiting import until

FAST = TimeModel(
    prefill_tokens_per_s=1e9, decode_base_s=0, decode_per_sequence_s=0, step_overhead_s=0.0005
)
SIZES = SchedulerConfig(num_gpu_blocks=65, block_size=4, max_model_len=256)
PROMPT = "The quick brown fox jumps over the lazy dog."  # 44 bytes: 11 blocks


class Client:
    """Asks one engine."""

    def __init__(self, service, session):
        self.service, self._session = service, session

    async def get(self, path):
        async with self._session.get(self.service.url + path) as reply:
            return reply.status, await reply.text()

    async def post(self, path, body):
        async with self._session.post(self.service.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def complete(self, prompt=PROMPT, **more):
        status, body = await self.post("/v1/completions", {"prompt": prompt, **more})
        assert status == 200, body
        return body

    async def stream(self, path, body):
        """The chunks, without the end marker, which must be there."""
        body = {**body, "stream": True}
        async with self._session.post(self.service.url + path, json=body) as reply:
            assert reply.content_type == "text/event-stream"
            *events, last, rest = (await reply.text()).split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def streaming(self, body):
        return self._session.post(
            self.service.url + "/v1/completions", json={**body, "stream": True}
        )

    async def metric(self, name):
        _, text = await self.get("/metrics")
        [line] = [line for line in text.splitlines() if line.startswith(name + "{")]
        return float(line.split()[-1])


def config(**more):
    return SimConfig(**{"scheduler": SIZES, "time_model": FAST, "grace_s": 0.1, **more})


async def clients(config):
    async with EngineService(config) as service, aiohttp.ClientSession() as session:
        yield Client(service, session)


@pytest.fixture
async def client():
    async for each in clients(
        config(lora_modules=(Lora("adapter", "/a"),), replay_endpoint="tcp://127.0.0.1:0")
    ):
        yield each


@pytest.fixture
async def slow_client():
    """An engine that takes for ever to prefill."""
    async for each in clients(config(time_model=TimeModel(prefill_tokens_per_s=0.001))):
        yield each


async def test_a_completion_and_its_usage(client):
    first = await client.complete(max_tokens=5)
    second = await client.complete(max_tokens=5)
    [choice] = first["choices"]
    assert (len(choice["text"]), choice["finish_reason"]) == (5, "length")
    assert second["choices"] == first["choices"]
    assert second["usage"] == {
        "prompt_tokens": 44,
        "completion_tokens": 5,
        "total_tokens": 49,
        "prompt_tokens_details": {"cached_tokens": 40},
    }
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_defaults_for_max_tokens(client):
    assert (await client.complete())["usage"]["completion_tokens"] == 16
    messages = [{"role": "user", "content": PROMPT}]
    _, body = await client.post("/v1/chat/completions", {"messages": messages})
    assert body["usage"]["total_tokens"] == 256
    _, body = await client.post(
        "/v1/chat/completions", {"messages": messages, "max_completion_tokens": 3}
    )
    assert body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["message"]["role"] == "assistant"


async def test_answers_end_at_max_tokens_whatever_the_body_says(client):
    body = await client.complete(max_tokens=8, stop=[" ", "e"], temperature=2, logprobs=3)
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][0]["logprobs"] is None


async def test_a_stream_is_the_same_answer_in_pieces(client):
    whole = await client.complete(max_tokens=5)
    chunks = await client.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_chat_stream_with_usage(client):
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "stream_options": {"include_usage": True},
    }
    await client.stream("/v1/chat/completions", body)
    opening, *tokens, last = await client.stream("/v1/chat/completions", body)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(chunk["choices"][0]["delta"]["content"]) for chunk in tokens] == [1] * 4
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 40


async def test_several_prompts_in_one_request(client):
    body = await client.complete([[1, 2, 3], [4, 5, 6, 7]], max_tokens=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 7
    chunks = await client.stream("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 0, 1, 1]


async def test_salts_and_adapters_do_not_share_blocks(client):
    await client.complete(max_tokens=1)
    for more in ({"cache_salt": "s"}, {"model": "adapter"}):
        body = await client.complete(max_tokens=1, **more)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        body = await client.complete(max_tokens=1, **more)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 40


async def test_models_health_and_tokenize(client):
    _, text = await client.get("/v1/models")
    base, adapter = json.loads(text)["data"]
    assert (base["id"], base["root"], base["max_model_len"]) == ("simulated", "simulated", 256)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("adapter", "/a", "simulated")
    assert await client.get("/health") == (200, "")
    _, body = await client.post("/tokenize", {"prompt": "ab"})
    assert body == {"count": 2, "max_model_len": 256, "tokens": [97, 98], "token_strs": None}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"prompt": "a", "model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": "a" * 256}, 400, "maximum context length is 256 tokens"),
        ({"prompt": "a", "max_tokens": 256}, 400, "maximum context length is 256 tokens"),
        ({"prompt": "a" * 241}, 400, "the prompt has 241"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"prompt": ""}, 400, "the prompt has 0"),
        ({"prompt": "a", "max_tokens": "x"}, 400, "Expected `int | null`, got `str`"),
        ({"prompt": "a", "n": 2}, 400, "n and best_of must be 1"),
        ({}, 400, "prompt: expected text"),
        ([], 400, "the body must be a JSON object"),
    ],
)
async def test_wrong_requests_are_answered_in_openai_form(client, body, status, sentence):
    got, answer = await client.post("/v1/completions", body)
    assert got == status
    assert sentence in answer["error"]["message"]


async def test_unknown_routes_too(client):
    status, text = await client.get("/nowhere")
    assert (status, json.loads(text)["error"]["code"]) == (404, 404)


async def test_metrics_have_vllms_names(client):
    for _ in range(2):
        await client.complete(max_tokens=2)
    assert await client.metric("vllm:prefix_cache_queries_total") == 88
    assert await client.metric("vllm:prefix_cache_hits_total") == 40
    assert await client.metric("vllm:generation_tokens_total") == 4
    assert await client.metric("vllm:num_requests_running") == 0
    _, text = await client.get("/metrics")
    assert 'block_size="4"' in text
    assert 'num_gpu_blocks="65"' in text


async def test_requests_show_while_they_run_and_end_with_their_client(slow_client):
    engine = slow_client.service.engines[0]
    # In one request: its step lasts for ever, and who comes later is not in it.
    prefix_query = asyncio.create_task(slow_client.complete([PROMPT, PROMPT], max_tokens=1))
    await until(lambda: len(engine.scheduler.running) == 2, "both requests run")
    assert await slow_client.metric("vllm:num_requests_running") == 2
    assert await slow_client.metric("vllm:kv_cache_usage_perc") == pytest.approx(12 / 64)
    assert await slow_client.post("/reset_prefix_cache", {}) == (200, {"success": False})
    prefix_query.cancel()
    await until(lambda: not engine.has_requests, "both requests are gone")
    assert engine.cache.num_free == 64
    assert await slow_client.post("/reset_prefix_cache", {}) == (200, {"success": True})


@pytest.fixture
async def long_client():
    """An engine whose answers take a second."""
    async for each in clients(config(time_model=TimeModel(decode_base_s=0.005))):
        yield each


async def test_a_client_that_leaves_a_stream_ends_its_request(long_client):
    engine = long_client.service.engines[0]
    async with long_client.streaming({"prompt": PROMPT, "max_tokens": 200}) as reply:
        await reply.content.readuntil(b"\n\n")
        assert engine.has_requests
    await until(lambda: not engine.has_requests, "the request is gone")
    assert engine.num_generated_tokens < 200


async def test_steps_take_their_time():
    model = TimeModel(prefill_tokens_per_s=1e6, decode_base_s=0.02, step_overhead_s=0.0)
    async for client in clients(config(time_model=model)):
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        await client.complete(max_tokens=11)
        assert loop.time() - started_at >= 10 * 0.02


async def test_a_router_that_follows_the_events_knows_the_cache(client):
    router, rank = Router(RouterConfig(block_size=4)), Rank("w")
    router.add_worker("w")
    for number in range(30):
        await client.complete([number % 7] * 50 + [number] * 30, max_tokens=3)
    await client.post("/reset_prefix_cache", {})
    await client.complete(max_tokens=1)
    for parts in replayed(client.service.replay_endpoint):
        batch = codec.decode(parts[-1])
        assert not batch.skipped
        assert not router.apply(rank, batch).rejected
    cached = client.service.engines[0].cache.pool.cached_hashes()
    assert len(router.index) == len(cached) == 11
    decision = router.route(list(PROMPT.encode()))
    assert decision.overlap_blocks == 11


def replayed(endpoint):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", bytes(8)])
        while True:
            assert dealer.poll(10_000)
            parts = dealer.recv_multipart()
            if not parts[-1]:
                return
            yield parts


async def test_a_taken_port_is_an_error_that_names_it(client):
    port = int(client.service.url.rpartition(":")[2])
    with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{port}"):
        async with EngineService(config(port=port)):
            pass


async def test_a_taken_events_endpoint_too(client):
    endpoint = client.service.events_endpoint
    with pytest.raises(TransportError, match=f"cannot publish events at '{endpoint}'"):
        async with EngineService(config(events_endpoint=endpoint)):
            pass


async def test_an_engine_without_events():
    async for client in clients(config(events_endpoint=None)):
        await client.complete()
        assert client.service.addresses() == {
            "url": client.service.url,
            "events": None,
            "replay": None,
        }


async def test_a_fault_in_a_step_ends_the_service_instead_of_hanging_it():
    service = EngineService(config())
    async with aiohttp.ClientSession() as session:
        await service.__aenter__()
        service.engines[0].submit([1], 1)
        service.engines[0].begin_step(0.0)  # by somebody who never finishes it
        prefix_query = asyncio.create_task(Client(service, session).complete())
        await until(service.stepping.done, "the engine stops stepping")
        with pytest.raises(RuntimeError, match="the step before has not been finished"):
            await service.__aexit__(None, None, None)
        with pytest.raises(aiohttp.ClientError):
            await prefix_query


async def test_an_endpoint_at_every_address_is_told_as_one_to_connect_to():
    for every in ("*", "0.0.0.0"):
        async with EngineService(config(events_endpoint=f"tcp://{every}:0")) as service:
            assert service.events_endpoint.startswith("tcp://127.0.0.1:")
            assert not service.events_endpoint.endswith(":0")


@pytest.fixture
def secret_key(tmp_path):
    _, path = zmq.auth.create_certificates(tmp_path, "server")
    Path(path).chmod(0o600)
    return path


@pytest.mark.parametrize("wire", ["kvplug", "vllm"])
async def test_the_variables_of_the_plugins_hold_here_too(wire, monkeypatch, secret_key):
    monkeypatch.setenv("KVPLUG_CURVE_KEY_FILE", secret_key)
    monkeypatch.setenv("KVPLUG_WORKER_URL", "http://a:1")
    monkeypatch.setenv("KVPLUG_CXL_POOLS", "3")
    async with EngineService(config(wire=wire)) as service:
        [publisher] = service._publishers
        assert publisher._authenticator is not None
        if wire == "kvplug":
            about = publisher.life.about
            assert (about.url, about.cxl_pools) == ("http://a:1", (3,))


async def test_a_key_that_cannot_be_used_is_no_engine(monkeypatch):
    monkeypatch.setenv("KVPLUG_CURVE_KEY_FILE", "/nowhere/key")
    with pytest.raises(ConfigError, match="/nowhere/key"):
        await EngineService(config()).__aenter__()


class TestRanks:
    """An engine with several data-parallel ranks."""

    @pytest.fixture
    async def two(self):
        async for each in clients(config(dp_size=2, replay_endpoint="tcp://127.0.0.1:0")):
            yield each

    async def ask(self, client, rank=None):
        headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
        url = client.service.url + "/v1/completions"
        async with client._session.post(url, json={"prompt": PROMPT}, headers=headers) as reply:
            body = await reply.json()
        return reply.status, body

    def num_queried(self, client):
        return [each.cache.num_queried_tokens for each in client.service.engines]

    async def test_the_header_chooses_the_rank(self, two):
        for _ in range(3):
            status, body = await self.ask(two, rank=1)
        assert self.num_queried(two) == [0, 3 * 44]
        assert (status, body["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 40)

    async def test_without_the_header_the_ranks_share_the_requests(self, two):
        for _ in range(4):
            await self.ask(two)
        assert self.num_queried(two) == [2 * 44, 2 * 44]

    async def test_a_header_that_is_no_number_is_read_over(self, two):
        assert (await self.ask(two, rank="one"))[0] == 200

    @pytest.mark.parametrize("rank", [-1, 2])
    async def test_a_rank_that_is_not_there_is_refused(self, two, rank):
        status, body = await self.ask(two, rank=rank)
        assert status == 400
        assert f"data_parallel_rank {rank} is out of range [0, 2)" in body["error"]["message"]

    async def test_each_rank_publishes_its_own_events(self, two):
        sources = json.loads((await two.get("/kv_event_sources"))[1])
        assert [int(rank) for rank in sources] == [0, 1]
        assert len({source["endpoint"] for source in sources.values()}) == 2
        for rank in (0, 1, 1):
            await self.ask(two, rank=rank)
        for rank, source in sources.items():
            batches = [codec.decode(parts[-1]) for parts in replayed(source["replay_endpoint"])]
            assert [batch.dp_rank for batch in batches] == [int(rank)] * len(batches)
            assert batches

    async def test_metrics_tell_the_ranks_apart(self, two):
        await self.ask(two, rank=1)
        text = (await two.get("/metrics"))[1]
        assert 'vllm:prefix_cache_queries_total{engine="0",model_name="simulated"} 0.0' in text
        assert 'vllm:prefix_cache_queries_total{engine="1",model_name="simulated"} 44.0' in text
        assert text.count("# TYPE vllm:prefix_cache_queries") == 1

    async def test_a_reset_forgets_all_ranks(self, two):
        for rank in (0, 1):
            await self.ask(two, rank=rank)
        assert await two.post("/reset_prefix_cache", {}) == (200, {"success": True})
        assert [each.cache.pool.cached_hashes() for each in two.service.engines] == [{}, {}]
