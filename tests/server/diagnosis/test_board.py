"""The diagnosis in a running router: found, logged once, shown, and cleared."""

import logging

import pytest

from kvplug.server.config import TokenizerFolder
from kvplug.server.diagnosis.finding import Code
from tests.server.diagnosis.test_facts import METRICS, SERVER_INFO, SOURCE
from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, routing
from tests.waiting import until

SOUND_VLLM = {
    "/version": {"version": "0.32.0"},
    "/kv_event_sources": {"0": SOURCE},
    "/metrics": METRICS.replace(b'block_size="32"', b'block_size="4"'),
}


def vllm(**says):
    engine = Engine()
    engine.says = SOUND_VLLM | {f"/{path}": body for path, body in says.items()}
    return engine


def codes(service, worker=None):
    return {f.code for f in service.diagnosis.look() if worker in (None, f.worker)}


async def test_findings_are_in_the_log_once_in_health_and_in_the_metrics(caplog):
    caplog.set_level(logging.INFO)
    engine = vllm(metrics=METRICS)
    async with routing(engine) as (service, client):
        await until(lambda: Code.BLOCK_SIZE in codes(service), "the block size is found wrong")
        async with client.get("/health") as response:
            findings = (await response.json())["findings"]
            assert response.status == 200
        [url] = service.fleet.workers
        [found] = [finding for finding in findings if finding["code"] == "block_size"]
        assert found == {
            "worker": url,
            "code": "block_size",
            "expected": "blocks of 4 tokens",
            "seen": "32",
            "fix": "start the router with --block-size 32, or the engine with --block-size 4",
        }
        metric = f'kvplug_findings{{code="block_size",worker="{url}"}}'
        async with client.get("/metrics") as response:
            assert f"{metric} 1.0" in await response.text()
        engine.says |= SOUND_VLLM  # it comes back with the right one
        service.fleet.mark_down(url, "a test says so")
        worker = service.fleet.workers[url]
        is_over = lambda: worker.is_up and Code.BLOCK_SIZE not in codes(service)  # noqa: E731
        await until(is_over, "the finding is over")
        async with client.get("/metrics") as response:
            assert f"{metric} 0.0" in await response.text()
    assert caplog.text.count("block_size: expected") == 1
    assert f"worker {url}: block_size no longer holds" in caplog.text


async def test_a_worker_that_was_down_is_asked_anew():
    engine = vllm(metrics=METRICS)
    async with routing(engine) as (service, _):
        await service.diagnosis.stop()  # asked by this test alone
        await service.diagnosis.ask()
        assert Code.BLOCK_SIZE in codes(service)
        engine.says |= SOUND_VLLM  # it comes back with the right one
        [worker] = service.fleet.workers.values()
        service.fleet.mark_down(worker.url, "a test says so")
        await until(lambda: worker.is_up, "it is up again")
        await service.diagnosis.ask()
        assert Code.BLOCK_SIZE not in codes(service)


async def test_a_worker_that_is_down_has_one_finding():
    async with routing() as (service, _):
        assert codes(service) == {Code.WORKER_DOWN}


async def test_sglang_is_asked_for_its_server_info():
    engine = Engine()
    engine.says = {"/server_info": SERVER_INFO | {"enable_cache_report": False}}
    async with routing(engine) as (service, _):
        await until(lambda: Code.EVENT_FORMAT in codes(service), "the format is found")
        assert codes(service) == {
            Code.BLOCK_SIZE,
            Code.EVENT_FORMAT,
            Code.NO_CACHED_TOKENS,
            Code.REPLAY_OFF,
        }


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", {"version": 7}])
async def test_an_engine_that_says_nonsense_is_an_engine_that_says_nothing(body):
    engine = vllm(version=body, kv_event_sources=body, metrics=body, server_info=body)
    async with routing(engine) as (service, _):
        [worker] = service.fleet.workers.values()
        await service.diagnosis.ask()
        assert worker.is_up
        assert codes(service) == {Code.NO_EVENT_ENDPOINT}


async def test_an_answer_without_cached_tokens_is_a_finding_until_one_comes():
    engine = vllm()
    engine.usage = {"prompt_tokens": 5}
    async with routing(engine) as (service, client):
        for _ in range(4):  # the first one predicts nothing
            await client.post("/v1/completions", json=COMPLETION)
        assert Code.NO_CACHED_TOKENS in codes(service)
        engine.usage["prompt_tokens_details"] = {"cached_tokens": 4}
        await client.post("/v1/completions", json=COMPLETION)
        assert Code.NO_CACHED_TOKENS not in codes(service)


async def test_text_is_compared_with_what_the_engine_makes_of_it(tiny_tokenizer_dir):
    engine = vllm(tokenize={"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]})
    async with routing(engine, tokenizers=(TokenizerFolder(tiny_tokenizer_dir),)) as (service, _):
        await until(lambda: Code.TOKENIZER in codes(service), "the tokenizer is found wrong")
        [finding] = [f for f in service.diagnosis.look() if f.code is Code.TOKENIZER]
        assert finding.seen == "a probe text in 3 tokens (1, 2, 3)"
        assert finding.expected.startswith("a probe text in ")


async def test_prompts_that_the_engine_counts_otherwise_are_a_finding():
    engine = vllm()
    engine.usage = {"prompt_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
    async with routing(engine) as (service, client):
        for _ in range(3):
            await client.post("/v1/completions", json=COMPLETION)
        [finding] = [f for f in service.diagnosis.look() if f.code is Code.TOKENIZER]
        assert (finding.expected, finding.seen) == (
            "a prompt of 5 tokens",
            "6 tokens; 3 of 3 requests differ",
        )


async def test_text_without_a_tokenizer_is_a_finding():
    async with routing(vllm()) as (service, client):
        assert Code.NO_TOKENIZER not in codes(service)
        await client.post("/v1/completions", json={"model": "m", "prompt": "some text"})
        assert Code.NO_TOKENIZER in codes(service)
