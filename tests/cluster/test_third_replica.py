"""Two routers follow engines over NATS and are killed; a third one has every block of them."""

import asyncio
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvplug import Rank
from kvplug.ingest.trust import Trust
from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.cluster.publishing import BLOCK_SIZE, held_by, publishing, publishing_directly
from tests.nats_servers import nats_servers
from tests.server.router_process import started
from tests.waiting import until

pytestmark = pytest.mark.slow
THRESHOLD = 50


@pytest.fixture
def node():
    with nats_servers() as [node]:
        yield node


def config(node, engines, router_id, *, events=None, **cluster):
    return ServerConfig(
        workers=tuple(WorkerSpec(url=each.url, events=events) for each in engines),
        port=0,
        router=RouterConfig(block_size=BLOCK_SIZE),
        cluster=ClusterConfig(
            nats=node.url,
            nats_fleet="f",
            router_id=router_id,
            router_snapshot_threshold=THRESHOLD,
            **cluster,
        ),
        grace_s=0.2,
    )


def flags(node, router_id):
    return (
        *("--nats", node.url, "--nats-fleet", "f", "--router-id", router_id),
        *("--router-snapshot-threshold", str(THRESHOLD), "--block-size", str(BLOCK_SIZE)),
    )


async def health(url):
    async with aiohttp.ClientSession(url) as client, client.get("/health") as answer:
        return await answer.json()


def is_exact(service, engines):
    followers = [service.fleet.follower_of(Rank(each.url)) for each in engines]
    return all(each is not None and each.trust.level is Trust.EXACT for each in followers)


@asynccontextmanager
async def two_routers(node, engines):
    """As processes, which start at once; yields (process, url) of each."""
    urls = [each.url for each in engines]
    async with AsyncExitStack() as stack:
        routers = [
            stack.enter_async_context(started(*urls, limit=1024, flags=flags(node, router_id)))
            for router_id in ("a", "b")
        ]
        yield [(process, url) for process, url, _ in await asyncio.gather(*routers)]


async def all_kept(engines):
    """Until the stream has all that was published."""
    publishers = [each.publisher for each in engines]
    await until(
        lambda: all(
            each.num_applied == each.num_published and not each.outbox.num_waiting
            for each in publishers
        ),
        "all is in the stream",
    )


async def all_applied(url):
    """Until every worker is exact there."""
    async with asyncio.timeout(30):
        while True:
            body = await health(url)
            levels = {each["ranks"][0]["events"]["trust"] for each in body["workers"]}
            if levels == {"exact"}:
                return body["cluster"]
            await asyncio.sleep(0.1)


async def test_a_third_replica_has_every_block_and_every_cxl_state(node, capsys):
    async with publishing(node, 3) as (engines, reference):
        readers = [each.url for each in engines]
        async with two_routers(node, engines) as routers:
            for engine in engines:
                engine.work(200, readers)
            await all_kept(engines)
            for process, url in routers:
                cluster = await all_applied(url)
                assert len(cluster["replicas"]) == 1
                process.kill()
            for process, _ in routers:
                await process.wait()
        for engine in engines:
            engine.work(20, readers)
        await all_kept(engines)
        num_answers = [each.publisher.answers.num_answers for each in engines]
        began_s = time.monotonic()
        async with RouterService(config(node, engines, "c")) as third:
            await until(
                lambda: held_by(third.router, engines) == held_by(reference, engines),
                "the third has every block",
            )
            took_s = time.monotonic() - began_s
            await until(lambda: is_exact(third, engines), "it knows that it has")
            answers = [each.publisher.answers for each in engines]
            assert [each.num_answers + each.num_malformed for each in answers] == num_answers
        with capsys.disabled():
            sys.stdout.write(f" [every block after {took_s:.2f} s]")


async def test_from_a_snapshot_too(node, monkeypatch):
    async with publishing(node, 2) as (engines, reference):
        monkeypatch.setattr("kvplug.cluster.replica.MIN_SNAPSHOT_INTERVAL_S", 0.1)
        async with RouterService(config(node, engines, "a")) as first:
            for _ in range(20):
                for engine in engines:
                    engine.work(20)
                await asyncio.sleep(0.05)
            status = first.cluster.replica
            await until(lambda: status.status.num_snapshots, "a snapshot is there")
            for engine in engines:
                engine.work(5)
            await until(lambda: is_exact(first, engines), "the first one is exact")
            await until(
                lambda: held_by(first.router, engines) == held_by(reference, engines),
                "the first has every block",
            )
        async with RouterService(config(node, engines, "b")) as second:
            status = second.cluster.replica.status
            assert status.restored_bytes
            assert second.cluster.replica._restored.snapshot is None, "its memory is given back"
            await until(
                lambda: held_by(second.router, engines) == held_by(reference, engines),
                "the second has every block",
            )
            await until(lambda: is_exact(second, engines), "it knows that it has")


async def test_what_comes_from_engines_directly_is_in_snapshots_too(node, monkeypatch):
    monkeypatch.setattr("kvplug.cluster.replica.MIN_SNAPSHOT_INTERVAL_S", 0.1)
    async with publishing_directly() as (engine, reference):
        events = engine.publisher.endpoint
        async with RouterService(config(node, [engine], "a", events=events)) as first:
            await until(lambda: is_exact(first, [engine]), "the first follows the engine")
            while first.cluster.replica.status.num_snapshots == 0:
                engine.work(2)
                await asyncio.sleep(0.02)
            num_snapshots = first.cluster.replica.status.num_snapshots
            await until(
                lambda: held_by(first.router, [engine]) == held_by(reference, [engine]),
                "the first has every block",
            )
            monkeypatch.setattr(first.cluster.replica, "_num_direct_saved", -1000)
            await until(
                lambda: first.cluster.replica.status.num_snapshots > num_snapshots,
                "a snapshot has all of it",
            )
        engine.publisher.shutdown()
        async with RouterService(config(node, [engine], "b", events=events)) as second:
            assert held_by(second.router, [engine]) == held_by(reference, [engine])


async def test_a_reset_leaves_a_living_replica_consistent(node):
    async with (
        publishing(node, 2) as (engines, reference),
        RouterService(config(node, engines, "a")) as living,
    ):
        for engine in engines:
            engine.work(100)
        await until(lambda: is_exact(living, engines), "the living one is exact")
        async with RouterService(config(node, engines, "b", router_reset_states=True)) as fresh:
            for engine in engines:
                engine.work(20)
            for service in (fresh, living):
                await until(
                    lambda service=service: (
                        is_exact(service, engines)
                        and held_by(service.router, engines) == held_by(reference, engines)
                    ),
                    "both are exact and have every block",
                )
            generations = {each.cluster.replica.status.generation for each in (fresh, living)}
            assert len(generations) == 1


async def test_a_router_serves_before_its_server_is_there(node):
    node.kill()
    async with (
        publishing(node, 1) as (engines, reference),
        RouterService(config(node, engines, "a")) as service,
    ):
        body = await health(service.url)
        assert body["status"] == "ok"
        assert [each["code"] for each in body["findings"] if each["worker"] == "cluster"] == [
            "nats_away"
        ]
        follower = service.fleet.follower_of(Rank(engines[0].url))
        assert follower.trust.level is not Trust.EXACT
        assert follower.trust.reason
        assert follower.trust.fix
        engines[0].work(10)
        node.start()
        await until(
            lambda: (
                is_exact(service, engines)
                and held_by(service.router, engines) == held_by(reference, engines)
            ),
            "it has caught up",
        )
        await until(lambda: service.cluster.replica.status.is_ready, "it is ready")


async def test_a_stream_that_is_deleted_is_made_again(node):
    async with (
        publishing(node, 1) as (engines, reference),
        RouterService(config(node, engines, "a")) as service,
    ):
        engines[0].work(30)
        await until(lambda: is_exact(service, engines), "it is exact")
        replica = service.cluster.replica
        before = replica.status.stream.created

        async def delete():
            js = (await replica.connection.connected()).jetstream()
            await js.delete_stream(replica.subjects.stream)

        await asyncio.wrap_future(replica.connection.submit(delete()))
        await until(lambda: replica.status.stream.created != before, "it is made again")
        engines[0].work(30)
        await until(
            lambda: (
                is_exact(service, engines)
                and held_by(service.router, engines) == held_by(reference, engines)
            ),
            "the new stream is followed",
        )
