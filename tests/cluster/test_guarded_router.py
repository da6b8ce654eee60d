"""A whole router with a key that may do what a router needs, and no more."""

import asyncio

import pytest

from examples import nats_permissions
from kvplug.cluster.streams import Streams, StreamSettings
from kvplug.nats import permissions
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from kvplug.server.service import RouterService
from tests.cluster.publishing import held_by, publishing
from tests.cluster.test_third_replica import config, is_exact
from tests.nats.keys import User
from tests.nats_servers import nats_servers
from tests.waiting import until

pytestmark = pytest.mark.slow
SUBJECTS = Subjects("f")


async def make_streams(url, key):
    settings = NatsSettings(servers=(url,), fleet="f", nkey_file=key)
    operator = NatsConnection(settings, "operator")
    operator.start()
    made = operator.submit(Streams(operator, SUBJECTS, StreamSettings()).ensure())
    await asyncio.wrap_future(made)
    await asyncio.to_thread(operator.stop)


async def test_a_router_needs_no_more_than_its_permissions(tmp_path, monkeypatch):
    monkeypatch.setattr("kvplug.cluster.replica.MIN_SNAPSHOT_INTERVAL_S", 0.1)
    users = {name: User(tmp_path, name) for name in ("operator", "router", "engine")}
    # Workers are not known before they run: this engine may publish for all.
    of_engine = permissions.of_publisher(SUBJECTS, ["*"])
    of_engine = of_engine._replace(
        publish=tuple(each.replace("%2A", "*") for each in of_engine.publish),
        subscribe=tuple(each.replace("%2A", "*") for each in of_engine.subscribe),
    )
    allowed = {
        "operator": permissions.of_operator(),
        "router": permissions.of_router(SUBJECTS, "a"),
        "engine": of_engine,
    }
    lines = nats_permissions.authorization(
        (users[name].public, each) for name, each in allowed.items()
    )
    with nats_servers(more=lines) as [node]:
        await make_streams(node.url, users["operator"].file)
        keys = {"nats_nkey_file": users["router"].file, "router_replica_sync": True}
        async with publishing(node, 1, nkey_file=users["engine"].file) as (engines, reference):
            for is_second in (False, True):
                async with RouterService(config(node, engines, "a", **keys)) as service:
                    replica = service.cluster.replica
                    assert bool(replica.status.restored_bytes) is is_second
                    while replica.status.num_snapshots == 0 and not is_second:
                        engines[0].work(3)
                        await asyncio.sleep(0.02)
                    await until(lambda s=service: is_exact(s, engines), "it is exact")
                    await until(
                        lambda s=service: held_by(s.router, engines) == held_by(reference, engines),
                        "it has every block",
                    )
                    status = replica.status
                    assert (status.refused, status.problems) == ((), {})
