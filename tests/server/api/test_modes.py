"""The router modes that need something of the request, over HTTP."""

import aiohttp
import pytest

from examples.launch.engine_env import ensure_tiny_tokenizer
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION, post_error, routing


async def served_by(client, service, **request):
    """The URL of the worker that a completion went to."""
    before = {url: counts.num_requests for url, counts in service.proxy.counts.items()}
    async with client.post("/v1/completions", json=COMPLETION, **request) as response:
        assert response.status == 200
    [url] = [u for u, c in service.proxy.counts.items() if c.num_requests > before[u]]
    return url


async def test_a_session_stays_on_its_worker_and_sessions_are_spread():
    async with routing(Engine(), Engine(), mode="rendezvous_hash") as (service, client):
        of_session = {}
        for number in range(16):
            headers = {"x-session-id": f"s{number}"}
            first = await served_by(client, service, headers=headers)
            assert await served_by(client, service, headers=headers) == first
            of_session[number] = first
        assert len(set(of_session.values())) == 2


async def test_direct_goes_where_the_header_says():
    async with routing(Engine(), Engine(), mode="direct") as (service, client):
        for url in [*service.proxy.counts] * 2:
            assert await served_by(client, service, headers={"x-kvplug-worker": url}) == url


async def test_direct_to_nobody_is_503_and_names_whom():
    async with routing(Engine(), mode="direct") as (_, client):
        client.headers["x-kvplug-worker"] = "http://nobody"
        status, code, message = await post_error(client, COMPLETION)
    assert (status, code) == (503, "no_worker")
    assert message.startswith("worker 'http://nobody' is none that serves")


async def test_weight_0_follows_no_events_and_says_so():
    async with served(Engine()) as url:
        config = ServerConfig(
            workers=(WorkerSpec(url=url, events="tcp://127.0.0.1:9"),),
            port=0,
            router=RouterConfig(overlap_score_weight=0.0),
            grace_s=0.2,
        )
        async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
            assert await served_by(client, service) == url
            async with client.get("/health") as response:
                [worker] = (await response.json())["workers"]
            events = worker["ranks"][0]["events"]
            assert events["trust"] == "unused"
            assert events["reason"].startswith("prefixes do not count with a weight of 0")
            async with client.get("/metrics") as response:
                metrics = await response.text()
            assert f'kvplug_trust{{level="unused",worker="{url}"}} 1.0' in metrics
            assert service.fleet.workers[url].followers == {}


@pytest.mark.parametrize("mode", ["round_robin", "least_loaded"])
async def test_text_is_not_tokenized_where_nothing_depends_on_it(mode):
    folder = TokenizerFolder(ensure_tiny_tokenizer())
    async with routing(Engine(), mode=mode, tokenizers=(folder,)) as (service, client):
        [counts] = service.proxy.counts.values()
        for prompt, num_tokens in (("once upon a time", 0), ([1, 2, 3], 3)):
            async with client.post("/v1/completions", json={"prompt": prompt}) as response:
                assert response.status == 200
            assert counts.num_prompt_tokens == num_tokens
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'kvplug_requests_without_prefix_total{reason="mode"} 1.0' in text
