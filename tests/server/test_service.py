"""The standalone router on real sockets, in front of engines that misbehave on request."""

import asyncio
import json
import shutil
import socket
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from examples.launch.engine_env import ensure_tiny_tokenizer
from kvplug import BlockStored, EventBatch, Namespace, Rank
from kvplug.errors import TransportError
from kvplug.ingest.follower import Follower
from kvplug.kernels import costing
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.waiting import until

COMPLETION = {"model": "m", "prompt": [1, 2, 3, 4, 5]}


@asynccontextmanager
async def routing(*engines, **settings):
    """A router before these engines: (service, client)."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(engine)) for engine in engines]
        yield await stack.enter_async_context(serving(urls, **settings))


@asynccontextmanager
async def serving(urls, *, mode="kv", health_interval_s=0.05, request_expiry_s=600.0, **settings):
    """A router before the engines at these URLs, or before none: (service, client)."""
    config = ServerConfig(
        workers=tuple(WorkerSpec(url=url) for url in urls or ["http://127.0.0.1:9"]),
        port=0,
        router=RouterConfig(block_size=4, mode=mode, request_expiry_s=request_expiry_s),
        health_interval_s=health_interval_s,
        grace_s=0.2,
        **settings,
    )
    async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
        yield service, client


async def post_error(client, body):
    """(status, code, message) of the answer to a completion that fails."""
    how = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with client.post("/v1/completions", **how) as response:
        return await error_of(response)


async def error_of(response):
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status, body["error"]["code"], body["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b'"text"', b"\xff", b"[" * 10_000])
async def test_a_body_that_is_no_json_object_is_400(body):
    async with routing(Engine()) as (_, client):
        status, code, message = await post_error(client, body)
        assert (status, code) == (400, "invalid_json")
        assert message.startswith("the body must be a JSON object")


async def test_an_unknown_model_is_404_and_says_what_is_served():
    async with routing(Engine()) as (_, client):
        error = await post_error(client, {**COMPLETION, "model": "x"})
        assert error == (404, "model_not_found", "the model 'x' does not exist; served are: m")


async def test_a_model_must_be_named_unless_there_is_one():
    async with routing(Engine(), Engine(models=["n"])) as (_, client):
        assert (await post_error(client, {"prompt": [1]}))[:2] == (400, "model_required")
    engine = Engine()
    async with routing(engine) as (_, client):
        response = await client.post("/v1/completions", json={"prompt": [1]})
        assert response.status == 200
    assert json.loads(engine.last_body) == {"prompt": [1]}


async def test_a_body_that_is_too_large_is_413():
    engine = Engine()
    async with routing(engine, max_body_bytes=1000) as (_, client):
        assert (await post_error(client, b" " * 2000))[:2] == (413, "body_too_large")
    assert engine.num_requests == 0


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nope"), ("GET", "/v1/completions")])
async def test_other_routes_and_methods_are_rejected_in_the_same_form(method, path):
    async with routing(Engine()) as (_, client):
        async with client.request(method, path) as response:
            status, _, message = await error_of(response)
        assert status in (404, 405)
        assert ("Allow" in response.headers) == (status == 405)
        assert path in message


async def test_no_worker_at_all_is_503_and_health_says_why():
    async with routing() as (_, client):
        assert (await post_error(client, COMPLETION))[:2] == (503, "no_worker")
        async with client.get("/health") as response:
            assert response.status == 503
            [worker] = (await response.json())["workers"]
        assert worker["state"] == "down"
        assert "Cannot connect" in worker["reason"]


async def test_of_a_worker_without_events_nobody_knows_the_cache():
    async with routing(Engine()) as (service, client):
        [counts] = service.proxy.counts.values()
        for _ in range(2):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
        assert counts.num_requests == 2
        resident = service.router.load.ranks[0, costing.RESIDENT_BLOCKS]
        assert resident == costing.UNKNOWN_BLOCKS  # as something was sent there


async def test_the_answer_and_the_body_pass_unchanged():
    engine = Engine()
    raw = b'{ "model": "m",  "prompt": [1, 2],"odd": 1.0}'
    async with routing(engine) as (_, client):
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        async with client.post("/v1/completions", data=raw, headers=headers) as response:
            assert await response.json() == {"choices": [{"text": "hi"}]}
            assert response.headers["x-engine"] == "1"
    assert engine.last_body == raw
    assert engine.last_headers["Authorization"] == "Bearer k"


async def test_a_reason_of_the_engine_passes_and_keeps_it_up():
    engine = Engine()
    engine.behaviour = "refuse"
    async with routing(engine) as (service, client):
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert (response.status, await response.json()) == (
                400,
                {"error": {"message": "too long"}},
            )
        assert all(w.is_up for w in service.fleet.workers.values())
        assert len(service.router.load) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_dies_before_its_answer_is_replaced(stream):
    dying, sound = Engine(), Engine()
    dying.behaviour = "die"
    async with routing(dying, sound, mode="round_robin") as (service, client):
        for _ in range(2):
            body = {**COMPLETION, "stream": stream}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
        assert sound.num_requests == 2
        assert sum(counts.num_lost for counts in service.proxy.counts.values()) >= 1
        assert len(service.router.load) == 0


async def test_an_answer_that_breaks_off_ends_with_an_error():
    engine = Engine()
    engine.behaviour = "half"
    async with routing(engine) as (service, client):
        body = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            events = (await response.read()).decode().strip().split("\n\n")
        assert [len(json.loads(event.removeprefix("data: "))) for event in events] == [1, 1]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert len(service.router.load) == 0


async def test_a_silent_worker_is_504_and_not_asked_twice():
    engine = Engine()
    engine.behaviour = "silent"
    async with routing(engine, Engine(models=["n"]), request_timeout_s=0.2) as (_, client):
        assert (await post_error(client, COMPLETION))[:2] == (504, "timeout")
    assert engine.num_requests == 1


async def test_a_client_that_leaves_stops_the_work_on_the_engine():
    engine = Engine()
    engine.behaviour = "slow"
    async with routing(engine) as (service, client):
        body = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            assert len(service.router.load) == 1
            response.close()
        await until(lambda: engine.num_cancelled == 1, "the engine's request is cancelled")
        await until(lambda: len(service.router.load) == 0, "its load is gone")
        assert all(worker.is_up for worker in service.fleet.workers.values())


async def test_a_client_that_closes_before_the_end_is_no_error(caplog):
    engine = Engine()
    engine.behaviour = "gated"
    async with routing(engine) as (service, client):
        body = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
            engine.gate.set()
        await until(lambda: len(service.router.load) == 0, "its load is gone")
    assert "Traceback" not in caplog.text
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_counts_as_load_for_as_long_as_it_is_served(stream):
    engine = Engine()
    engine.behaviour = "slow" if stream else "silent"
    async with routing(engine, request_expiry_s=0.2) as (service, client):
        body = {**COMPLETION, "stream": stream}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.num_requests == 1, "the engine works on it")
        load = service.router.load
        [request] = load._requests.values()
        may_end_s = request.routed_s + 1.0
        await until(lambda: request.deadline_s > may_end_s, "it is renewed again and again")
        assert (len(load), load.num_expired) == (1, 0)
        asked.cancel()
        if stream:
            (await asked).close()
        await until(lambda: len(load) == 0, "its load is gone")


async def test_a_client_that_shuts_its_side_down_has_left():
    engine = Engine()
    engine.behaviour = "slow"
    async with routing(engine) as (service, _):
        port = int(service.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write_eof()
        await until(lambda: engine.num_cancelled == 1, "the engine's request is cancelled")
        await reader.read()
        assert reader.at_eof()
        writer.close()


async def test_a_worker_that_comes_back_is_used_again():
    engine = Engine()
    async with routing(engine) as (service, client):
        [worker] = service.fleet.workers.values()
        service.fleet.mark_down(worker.url, "a test says so")
        await until(lambda: worker.is_up, "the next look finds it up")
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200


async def test_with_no_worker_up_those_that_were_are_asked():
    async with routing(Engine(), health_interval_s=60) as (service, client):
        [worker] = service.fleet.workers.values()
        service.fleet.mark_down(worker.url, "a test says so")
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200


async def test_a_worker_is_down_when_two_looks_in_a_row_fail():
    engine = Engine()
    async with routing(engine, connect_timeout_s=0.1) as (service, _):
        [worker] = service.fleet.workers.values()
        engine.is_healthy.clear()
        await until(lambda: worker.num_failed_looks == 1, "a look has failed")
        assert worker.is_up
        engine.is_healthy.set()
        await until(lambda: worker.num_failed_looks == 0, "the next one succeeds")
        assert worker.is_up
        engine.is_healthy.clear()
        await until(lambda: not worker.is_up, "two looks have failed")


async def test_models_of_all_workers_are_listed_and_kept_apart():
    first, second = Engine(models=["m"]), Engine(models=["m", "n"])
    async with routing(first, second) as (_, client):
        async with client.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["m", "n"]
        for _ in range(3):
            async with client.post("/v1/completions", json={**COMPLETION, "model": "n"}) as answer:
                assert answer.status == 200
    assert (first.num_requests, second.num_requests) == (0, 3)


async def test_text_without_a_tokenizer_is_routed_by_load_and_counted(caplog):
    async with routing(Engine()) as (_, client):
        for _ in range(2):
            body = {"model": "m", "prompt": "some text"}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'kvplug_requests_untokenized_total{model="m"} 2.0' in text
    assert caplog.text.count("without prefix knowledge") == 1
    assert "--tokenizer" in caplog.text


async def test_the_tokenizer_of_a_hub_model_is_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--name"
    folder = model / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    shutil.copytree(ensure_tiny_tokenizer(), folder, dirs_exist_ok=True)
    engine = Engine()
    engine.root = "org/name"
    async with routing(engine) as (service, client):
        body = {"model": "m", "prompt": "some text"}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200
        [counts] = service.proxy.counts.values()
        assert counts.num_prompt_tokens > 0


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "multimodal",
        ),
        ("/v1/chat/completions", {"messages": 7}, "untokenizable"),
        ("/v1/chat/completions", {"messages": [], "tools": [0] * 70_000}, "too_long"),
        ("/v1/completions", {"prompt": [1, 2], "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/completions", {"prompt": [1, 2, 3, 4], "extra_key": "tenant"}, "extra_key"),
    ],
)
async def test_what_cannot_be_known_of_a_prefix_is_counted_and_named(path, more, reason, caplog):
    async with routing(Engine(), tokenizers=(TokenizerFolder(ensure_tiny_tokenizer()),)) as (
        _,
        client,
    ):
        for _ in range(2):
            async with client.post(path, json={"model": "m", **more}) as response:
                assert response.status == 200
        async with client.get("/metrics") as response:
            text = await response.text()
    assert f'kvplug_requests_without_prefix_total{{reason="{reason}"}} 2.0' in text
    named = caplog.text.count(f"requests without prefix knowledge: {reason}")
    assert named == (0 if reason in ("untokenizable", "too_long") else 1)


def stored(tokens, *, lora=""):
    event = BlockStored(
        block_hashes=(hash(lora) % 2**64,),
        token_ids=tuple(tokens),
        block_size=4,
        namespace=Namespace(lora_name=lora),
    )
    return EventBatch(events=(event,))


async def test_an_adapter_is_asked_for_by_name_and_has_its_own_blocks():
    first, second = Engine(adapters=["a"]), Engine(adapters=["a"])
    async with routing(first, second) as (service, client):
        url = list(service.fleet.workers)[1]
        service.router.set_confidence(Rank(url), 1.0)  # as if its events were followed
        service.router.apply(Rank(url), stored([1, 2, 3, 4], lora="a"))
        for model in ("a", "m"):
            body = {**COMPLETION, "model": model}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
            cached = service.proxy.counts[url].num_cached_tokens
            assert cached == 4  # of the request for "a"; the one for "m" adds nothing
        async with client.get("/health") as response:
            assert {w["block_size"] for w in (await response.json())["workers"]} == {4}
        async with client.get("/v1/models") as response:
            cards = {card["id"]: card.get("parent") for card in (await response.json())["data"]}
        assert cards == {"a": "m", "m": None}
    assert first.num_requests + second.num_requests == 2


async def test_an_adapter_that_is_loaded_later_is_found():
    engine = Engine()
    async with routing(engine) as (service, client):
        body = {**COMPLETION, "model": "late"}
        assert (await post_error(client, body))[:2] == (404, "model_not_found")
        engine.adapters = ["late"]
        await until(lambda: service.fleet.served_as("late"), "the next look finds it")
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200


@pytest.mark.parametrize("how", [{"model": "m:a"}, {"model": "m", "lora_path": "a"}])
async def test_an_adapter_of_sglang_goes_only_where_it_is_loaded(how):
    bare, loaded = Engine(owned_by="sglang"), Engine(adapters=["a"], owned_by="sglang")
    async with routing(bare, loaded) as (service, client):
        for _ in range(3):
            async with client.post("/v1/completions", json={**COMPLETION, **how}) as response:
                assert response.status == 200
        assert (await post_error(client, {**COMPLETION, "model": "a"}))[0] == 404
        assert {group.model for group in service.router.fleet_index.groups} == {"m"}
    assert (bare.num_requests, loaded.num_requests) == (0, 3)


async def test_models_have_indexes_of_their_own():
    async with routing(Engine(), Engine(models=["n"])) as (service, client):
        groups = service.router.fleet_index.groups
        assert {group.model for group in groups} == {"m", "n"}
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'kvplug_index_blocks{block_size="4",model="n"} 0.0' in text


async def test_metrics_count_requests_by_worker():
    async with routing(Engine(), Engine(), mode="round_robin") as (service, client):
        for _ in range(4):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
        async with client.get("/metrics") as response:
            text = await response.text()
        for url in service.fleet.workers:
            assert f'kvplug_requests_total{{worker="{url}"}} 2.0' in text
            assert f'kvplug_worker_up{{worker="{url}"}} 1.0' in text


async def test_a_taken_port_is_a_clear_error():
    async with routing(Engine()) as (service, _):
        port = int(service.url.rpartition(":")[2])
        spec = WorkerSpec(url="http://127.0.0.1:9")
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with RouterService(ServerConfig(workers=(spec,), port=port)):
                pass


async def test_an_event_endpoint_that_is_none_is_a_clear_error_and_leaves_nothing_open():
    spec = WorkerSpec(url="http://127.0.0.1:9", events="carrier://pigeon")
    with pytest.raises(TransportError, match="cannot subscribe to events at 'carrier://pigeon'"):
        async with RouterService(ServerConfig(workers=(spec,), port=0)):
            pass


async def test_a_worker_that_lists_no_models_is_down_with_the_reason():
    engine = Engine()
    engine.models = [None]
    async with routing(engine) as (_, client), client.get("/health") as response:
        [worker] = (await response.json())["workers"]
    assert worker["state"] == "down"
    assert "Expected `str`" in worker["reason"]


async def test_an_answer_that_is_nested_too_deeply_does_not_end_the_looks_at_a_worker():
    engine = Engine()
    list_soundly = engine.list_models

    async def list_models(request):
        if engine.behaviour == "ok":
            return await list_soundly(request)
        return web.Response(body=b'{"data": [], "more": ' + b"[" * 100_000)

    engine.list_models = list_models
    async with routing(engine) as (service, _):
        [worker] = service.fleet.workers.values()
        engine.behaviour = "nested"
        await until(lambda: not worker.is_up, "two looks have failed")
        engine.behaviour = "ok"
        await until(lambda: worker.is_up, "it is looked at again")


class Growing(Counter):
    """Another thread adds to it while it is gone through."""

    def items(self):
        for item in super().items():
            self[f"more than {len(self)}"] = None
            yield item

    def copy(self):
        return Counter(dict(self))


async def test_what_other_threads_add_does_not_disturb_a_scrape():
    async with routing(Engine()) as (service, client):
        [worker] = service.fleet.workers.values()
        worker.followers[0] = Follower(service.router, Rank(worker.url))
        worker.followers[0]._skips.by_reason = Growing(duplicate=1)
        service.diagnosis._prompts._tokenizers = Growing(m=None)
        async with client.get("/metrics") as response:
            assert response.status == 200
            assert 'reason="duplicate"' in await response.text()


async def test_requests_in_flight_may_end_when_the_router_stops():
    engine = Engine()
    engine.behaviour = "gated"
    async with AsyncExitStack() as stack:
        spec = WorkerSpec(url=await stack.enter_async_context(served(engine)))
        service = RouterService(ServerConfig(workers=(spec,), port=0, grace_s=20.0))
        await service.__aenter__()
        url = service.url
        client = await stack.enter_async_context(aiohttp.ClientSession(service.url))
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
        await response.content.readline()
        stopping = asyncio.create_task(service.__aexit__(None, None, None))
        await until(lambda: not accepts(url), "no more connections are taken")
        engine.gate.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await stopping


def accepts(url):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


async def test_an_adapter_from_another_path_keeps_nothing_of_what_it_computed_before():
    engine = Engine(adapters=["l"])
    async with routing(engine) as (service, _):
        [worker] = service.fleet.workers.values()
        await until(lambda: worker.lora_paths.get("l") == "x", "it is known where it came from")
        stored = BlockStored(
            block_hashes=(1,), token_ids=(1, 2, 3, 4), block_size=4, namespace=Namespace("l")
        )
        others = structs.replace(stored, block_hashes=(2,), namespace=Namespace("other"))
        service.router.apply(Rank(worker.url), EventBatch(events=(stored, others)))
        engine.adapters = []
        await until(lambda: "l" not in worker.models, "it is unloaded")
        assert len(service.router.index) == 2
        engine.adapters, engine.lora_path = ["l"], "y"
        await until(lambda: len(service.router.index) == 1, "its blocks are forgotten")
        assert service.router.index.engine_hashes_of(Rank(worker.url)).tolist() == [2]
