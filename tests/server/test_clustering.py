"""Routers that share no events, only their load; and an embedded server."""

import asyncio
import json
import os
import signal

import aiohttp
import pytest

from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.nats_servers import nats_servers
from tests.waiting import until


@pytest.fixture(scope="module")
def node():
    with nats_servers() as [node]:
        yield node


def config(*, use_kv_events=True, **cluster):
    return ServerConfig(
        workers=(WorkerSpec(url="http://127.0.0.1:9"),),
        port=0,
        router=RouterConfig(block_size=4, use_kv_events=use_kv_events),
        cluster=ClusterConfig(**cluster),
        grace_s=0.2,
    )


async def page(service, path):
    async with aiohttp.ClientSession(service.url) as client, client.get(path) as answer:
        return await answer.text()


async def health(service):
    return json.loads(await page(service, "/health"))


async def test_routers_without_events_share_their_load(node):
    def of(router_id):
        cluster = {"nats": node.url, "router_id": router_id, "router_replica_sync": True}
        return RouterService(config(use_kv_events=False, **cluster))

    async with of("a") as one:
        async with of("b") as two:
            for service, other in ((one, "b"), (two, "a")):
                await until(lambda s=service: s.cluster.sync.status().peers, "its load is heard")
                await until(lambda s=service: s.cluster.replica.status.replicas, "it is seen")
                cluster = (await health(service))["cluster"]
                assert list(cluster["replicas"]) == list(cluster["sync"]["peers"]) == [other]
                assert cluster["stream"] is None
        await until(lambda: not one.cluster.replica.status.replicas, "the other has left")


async def test_an_embedded_server_comes_and_goes_with_its_router(tmp_path):
    embedded = {"nats": "embedded", "nats_store": tmp_path, "nats_port": 0}
    created = set()
    for _ in range(2):
        async with RouterService(config(**embedded)) as service:
            await until(lambda s=service: s.cluster.replica.status.is_ready, "it is ready")
            cluster = (await health(service))["cluster"]
            assert cluster["is_connected"]
            assert cluster["sync"] is None
            created.add(cluster["stream"]["created"])
            assert "kvplug_nats_connected 1.0" in await page(service, "/metrics")
    assert len(created) == 1


async def test_an_embedded_server_that_is_killed_is_started_again(tmp_path):
    embedded = {"nats": "embedded", "nats_store": tmp_path, "nats_port": 0}
    async with RouterService(config(**embedded)) as service:
        cluster = service.cluster
        await until(lambda: cluster.replica.status.is_ready, "it is ready")
        first = cluster.embedded.process_id
        for number in (1, 2):
            os.kill(cluster.embedded.process_id, signal.SIGKILL)
            await until(lambda: not cluster.replica.status.is_connected, "it is gone")
            await until(lambda n=number: cluster.embedded.num_restarts == n, "it is started again")
            await until(lambda: cluster.replica.status.is_connected, "it is connected")
        assert cluster.embedded.process_id != first
        assert (await health(service))["cluster"]["embedded_restarts"] == 2
        assert "kvplug_nats_server_restarts_total 2.0" in await page(service, "/metrics")


async def test_a_second_router_of_one_id_goes_on_with_another(node):
    same = config(nats=node.url, router_id="a", nats_fleet="g")
    async with RouterService(same) as one, RouterService(same) as two:
        await until(lambda: one.cluster.replica.status.replicas, "the other is seen")
        assert two.cluster.replica.router_id.startswith("a-")
        assert [f for f in (await health(two))["findings"] if f["worker"] == "cluster"] == []


async def test_a_lost_server_is_a_finding_until_it_is_back():
    with nats_servers() as [node]:
        async with RouterService(config(nats=node.url, router_id="a")) as service:
            await until(lambda: service.cluster.replica.status.is_ready, "it is ready")
            node.kill()
            codes = await asyncio.wait_for(codes_of(service, "nats_away"), 30)
            assert codes == ["nats_away"]
            node.start()
            assert await asyncio.wait_for(codes_of(service), 30) == []


async def test_a_server_without_jetstream_keeps_no_router_from_serving():
    with nats_servers() as [node]:
        node.stop()
        lines = node.config.read_text().splitlines()
        node.config.write_text("\n".join(each for each in lines if "jetstream" not in each))
        node.start(wait=False)
        async with asyncio.timeout(30), RouterService(config(nats=node.url)) as service:
            await codes_of(service, "nats_stream")
            node.stop()
            node.config.write_text("\n".join(lines))
            node.start()
            await codes_of(service)


async def codes_of(service, *wanted):
    """Once the findings about the cluster are these."""
    while True:
        findings = (await health(service))["findings"]
        codes = [each["code"] for each in findings if each["worker"] == "cluster"]
        if codes == list(wanted):
            return codes
        await asyncio.sleep(0.1)
