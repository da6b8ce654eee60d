"""Workers that are named by their event endpoint: their publishers say where their API is."""

from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplug import protocol
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.diagnosis.finding import Code
from kvplug.server.service import RouterService
from tests.server.engine import Engine, served
from tests.server.kvplug_publisher import free_endpoint, next_port, publishing
from tests.server.test_service import COMPLETION
from tests.waiting import until


@pytest.fixture
def endpoint():
    return free_endpoint()


@asynccontextmanager
async def routing(*workers):
    config = ServerConfig(
        workers=tuple(map(WorkerSpec.parse, workers)),
        port=0,
        router=RouterConfig(block_size=4),
        health_interval_s=0.02,
        grace_s=0.2,
    )
    async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
        yield service, client


async def health_of(client, name):
    async with client.get("/health") as response:
        return next(w for w in (await response.json())["workers"] if w["name"] == name)


async def test_it_is_unknown_until_its_publisher_says_its_url(endpoint, caplog):
    async with routing(endpoint) as (service, client), served(Engine()) as url:
        worker = service.fleet.workers[endpoint]
        shown = await health_of(client, endpoint)
        assert (shown["url"], shown["state"]) == (None, "unknown")
        assert "nothing has come from its event endpoint yet" in shown["reason"]
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 503
        [finding] = service.diagnosis.look()
        assert (finding.worker, finding.code) == (endpoint, Code.WORKER_UNKNOWN)
        with publishing(endpoint, url=url):
            await until(lambda: worker.is_up, "it is found")
            shown = await health_of(client, endpoint)
            assert (shown["url"], shown["state"]) == (url, "up")
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
            async with client.get("/metrics") as response:
                count = f'kvplug_requests_total{{worker="{endpoint}"}} 1.0'
                assert count in await response.text()
            assert Code.WORKER_UNKNOWN not in {f.code for f in service.diagnosis.look()}
    assert caplog.text.count("nothing has come") == 2  # from the fleet, and as a finding
    assert "worker_down" not in caplog.text


@pytest.mark.parametrize(
    ("said", "reason"), [("", "KVPLUG_WORKER_URL"), ("ftp://x", "no http URL")]
)
async def test_a_hello_without_a_url_is_named_with_what_to_set(said, reason, endpoint, caplog):
    async with routing(endpoint) as (service, _):
        with publishing(endpoint, url=said):
            worker = service.fleet.workers[endpoint]
            await until(lambda: reason in worker.down_because, "the reason is known")
            [finding] = service.diagnosis.look()
            assert "KVPLUG_WORKER_URL" in finding.fix
    assert reason in caplog.text


async def test_a_publisher_of_another_version_is_named(endpoint, monkeypatch):
    async with routing(endpoint) as (service, client):
        worker = service.fleet.workers[endpoint]
        monkeypatch.setattr(protocol, "encode", encode_as_version_9)
        with publishing(endpoint, url="http://127.0.0.1:9"):
            await until(lambda: "the same release" in worker.down_because, "it is unreadable")
            shown = await health_of(client, endpoint)
            assert shown["ranks"][0]["events"]["wire"] == "kvplug"
            assert shown["ranks"][0]["events"]["skipped"]["unsupported_version"] > 0


def encode_as_version_9(message, encode=protocol.encode):
    """A head with another major version."""
    head = encode(message)
    at = 2 + len(protocol.MAGIC)
    return head[:at] + b"\x09" + head[at + 1 :]


async def test_two_names_of_one_engine_are_one_worker(endpoint):
    async with served(Engine()) as url, routing(url, endpoint) as (service, _):
        first, second = (service.fleet.workers[name] for name in (url, endpoint))
        with publishing(endpoint, url=url):
            await until(lambda: "already" in second.down_because, "it is refused")
        assert second.down_because == f"its hello says {url}, which is worker {url} already"
        assert first.is_up
        assert second.url is None


async def test_no_hello_takes_requests_away_from_an_engine_that_answers(endpoint):
    async with (
        routing(endpoint) as (service, _),
        served(Engine()) as url,
        served(Engine()) as other,
    ):
        worker = service.fleet.workers[endpoint]
        with publishing(endpoint, url=url) as stream:
            await until(lambda: worker.is_up, "it is found")
            stream.note(url=other)
            await until(lambda: worker.about.url == other, "the hello has come")
            worker.num_failed_looks = 1
            await until(lambda: worker.num_failed_looks == 0, "it was looked at again")
            assert worker.url == url
            service.fleet.mark_down(endpoint, "a test says so")
            await until(lambda: worker.is_up, "it is found again")
            assert worker.url == other


async def test_an_engine_that_tells_no_ranks_has_those_that_its_hello_says(endpoint):
    async with routing(endpoint) as (service, _), served(Engine()) as url:
        worker = service.fleet.workers[endpoint]
        with publishing(endpoint, url=url, dp_size=2):
            await until(lambda: worker.is_up, "it is found")
        assert [str(rank) for rank in worker.ranks] == [endpoint, f"{endpoint}#1"]
        assert [s.events for s in worker.sources] == [endpoint, next_port(endpoint)]
        assert set(worker.followers) == {0, 1}
