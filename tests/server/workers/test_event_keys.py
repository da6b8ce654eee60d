"""Event streams with CURVE keys: who is followed, and what is said of who is not."""

import os
import shutil

import pytest
import zmq.auth

from kvplug.curve_keys import ServerKeys
from kvplug.ingest.trust import Trust
from kvplug.server.diagnosis.finding import Code
from tests.server.engine import Engine, served
from tests.server.kvplug_publisher import publishing
from tests.server.workers.test_discovery import routing
from tests.waiting import until


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder with the keys of engines, of a router, and of somebody else."""
    folder = tmp_path_factory.mktemp("keys")
    before = os.umask(0o077)
    try:
        for name in ("engines", "router", "stranger"):
            zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)
    (folder / "allowed").mkdir()
    shutil.copy(folder / "router.key", folder / "allowed")
    return folder


@pytest.fixture(scope="module")
def server_keys(keys):
    return ServerKeys.from_files(keys / "engines.key_secret", keys / "allowed")


def settings(keys, name="router"):
    return {
        "events_key_file": keys / f"{name}.key_secret",
        "events_server_key": keys / "engines.key",
    }


async def test_a_router_with_the_keys_follows_and_asks(keys, server_keys):
    async with served(Engine()) as url:
        with publishing(url=url, keys=server_keys) as stream:
            async with routing(stream.endpoint, **settings(keys)) as (service, _):
                [worker] = service.fleet.workers.values()
                await until(lambda: worker.is_up, "it is found")
                follower = worker.followers[0]
                await until(lambda: follower.trust.level is Trust.EXACT, "all is known")


@pytest.mark.parametrize("router", [None, "stranger"])
async def test_a_router_without_a_key_that_is_allowed_hears_nothing(keys, server_keys, router):
    async with served(Engine()) as url:
        with publishing(url=url, keys=server_keys) as stream:
            more = {} if router is None else settings(keys, router)
            async with routing(f"{url},events={stream.endpoint}", **more) as (service, _):
                await until_disconnected(service)
                assert service.fleet.workers[url].followers[0].num_messages == 0


async def test_a_publisher_without_keys_is_not_followed_with_keys(keys):
    async with served(Engine()) as url:
        with publishing(url=url) as stream:
            async with routing(f"{url},events={stream.endpoint}", **settings(keys)) as (service, _):
                finding = await until_disconnected(service)
                assert "a stock publisher has none" in finding.fix


async def until_disconnected(service):
    service.diagnosis._connect_grace_s = 0.3
    found = lambda: [f for f in service.diagnosis.look() if f.code is Code.EVENTS_DISCONNECTED]  # noqa: E731
    [finding] = await until(found, "it is found that nothing is connected")
    return finding
