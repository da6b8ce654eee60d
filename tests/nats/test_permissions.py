"""What each key may do on a real server: all that it needs, and nothing else."""

import asyncio
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import nats.errors
import pytest
from nats.js import api

from examples import nats_permissions
from kvplug import Rank, Router, RouterConfig
from kvplug.cluster.replica import Replica, ReplicaSettings
from kvplug.cluster.streams import Streams, StreamSettings
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.nats import permissions
from kvplug.nats.client import connect
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.topics import Topic
from kvplug.transports import TRANSPORTS
from tests.forwarder.engines import engine, forwarding
from tests.nats.keys import Operator, User, make_certificates, tls_lines
from tests.nats_servers import nats_servers
from tests.plugins.nats_reader import NatsReader
from tests.waiting import until

SUBJECTS = Subjects("default")
WORKER, OTHER = "http://10.0.0.7:8000", "http://10.0.0.8:8000"
MINE, THEIRS = PublisherName(WORKER, 0), PublisherName(OTHER, 0)
ALLOWED = {
    "engine": permissions.of_publisher(SUBJECTS, [WORKER]),
    "router": permissions.of_router(SUBJECTS, "a"),
    "operator": permissions.of_operator(),
}
NAMES = {"engine": "engine", "router": "router-a", "operator": "operator"}


@asynccontextmanager
async def guarded(tmp_path, kind, more=""):
    """A server, and per key what nats.connect needs besides the URL."""
    if kind == "nkeys":
        users = {name: User(tmp_path, name) for name in ALLOWED}
        lines = nats_permissions.authorization(
            (users[name].public, allowed) for name, allowed in ALLOWED.items()
        )
        options = {name: {"nkeys_seed": str(each.file)} for name, each in users.items()}
    else:
        operator = Operator(tmp_path)
        lines = operator.lines
        options = {
            name: {"user_credentials": str(operator.creds(name, allowed))}
            for name, allowed in ALLOWED.items()
        }
    with nats_servers(more=lines + more) as [node]:
        yield node.url, options


class Client:
    """One that knows what it was refused."""

    def __init__(self):
        self.refused, self._has_news = [], asyncio.Event()

    async def _note(self, error):
        self.refused.append(str(error))
        self._has_news.set()

    async def open(self, url, name, options):
        self.nc = await connect(
            url, error_cb=self._note, allow_reconnect=False, name=NAMES[name],
            inbox_prefix=f"_INBOX.{NAMES[name]}".encode(), **options,
        )  # fmt: skip
        return self

    async def is_refused(self, subject, *, listens=False):
        self._has_news.clear()
        if listens:
            await self.nc.subscribe(subject)
        else:
            await self.nc.publish(subject, b"")
        await self.nc.flush()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), 0.5)
        return self._has_news.is_set()


@asynccontextmanager
async def clients(url, options):
    made = {name: await Client().open(url, name, each) for name, each in options.items()}
    try:
        yield made
    finally:
        for each in made.values():
            await each.nc.close()


async def make_streams(operator):
    js = operator.nc.jetstream()
    await js.add_stream(
        name=SUBJECTS.stream, subjects=[SUBJECTS.all_events, SUBJECTS.marks], allow_direct=True
    )
    await js.create_key_value(api.KeyValueConfig(bucket=SUBJECTS.state_bucket))
    await js.create_object_store(SUBJECTS.snapshot_bucket)


@pytest.mark.parametrize("kind", ["nkeys", "creds"])
async def test_each_key_may_do_its_own_and_no_more(tmp_path, kind):
    async with guarded(tmp_path, kind) as (url, options), clients(url, options) as made:
        engine, router = made["engine"], made["router"]
        await make_streams(made["operator"])
        assert (await engine.nc.jetstream().publish(SUBJECTS.events(MINE), b"x")).seq == 1
        for subject in (
            SUBJECTS.events(THEIRS), SUBJECTS.beats(THEIRS), SUBJECTS.asks(MINE),
            SUBJECTS.sync("a"),
            f"$JS.API.STREAM.PURGE.{SUBJECTS.stream}", f"$KV.{SUBJECTS.state_bucket}.manifest",
            "_INBOX.router-a.x",
        ):  # fmt: skip
            assert await engine.is_refused(subject), subject
        for subject in (SUBJECTS.all_events, SUBJECTS.asks(THEIRS), "_INBOX.router-a.>", ">"):
            assert await engine.is_refused(subject, listens=True), subject
        for subject in (
            SUBJECTS.events(MINE), SUBJECTS.beats(MINE), SUBJECTS.sync("b"),
            f"$JS.API.STREAM.CREATE.{SUBJECTS.stream}", f"$JS.API.STREAM.DELETE.{SUBJECTS.stream}",
            f"$JS.API.CONSUMER.DELETE.{SUBJECTS.stream}.router-b",
        ):  # fmt: skip
            assert await router.is_refused(subject), subject
        assert await router.is_refused("_INBOX.engine.>", listens=True)
        assert await made["operator"].is_refused(SUBJECTS.events(MINE))


async def test_a_router_may_keep_snapshots_and_read(tmp_path):
    async with guarded(tmp_path, "nkeys") as (url, options), clients(url, options) as made:
        await make_streams(made["operator"])
        router = made["router"]
        js = router.nc.jetstream()
        await made["engine"].nc.jetstream().publish(SUBJECTS.events(MINE), b"x")
        consumer = api.ConsumerConfig(durable_name="router-a", ack_policy=api.AckPolicy.ALL)
        await js.add_consumer(SUBJECTS.stream, consumer)
        reading = await js.pull_subscribe_bind("router-a", SUBJECTS.stream)
        [message] = await reading.fetch(1, timeout=2)
        await message.ack_sync()
        bucket = await js.key_value(SUBJECTS.state_bucket)
        revision = await bucket.put("manifest", b"1")
        assert (await bucket.get("manifest")).revision == revision
        store = await js.object_store(SUBJECTS.snapshot_bucket)
        await store.put("s", bytes(300_000))
        await js.purge_stream(f"OBJ_{SUBJECTS.snapshot_bucket}")
        await js.purge_stream(SUBJECTS.stream, seq=2)
        assert await js.consumers_info(SUBJECTS.stream)
        assert not router.refused


async def test_an_answer_goes_to_who_asks(tmp_path):
    async with guarded(tmp_path, "nkeys") as (url, options), clients(url, options) as made:
        engine, router = made["engine"].nc, made["router"].nc

        async def answer(msg):
            for _ in range(100):
                await engine.publish(msg.reply, b"x")

        await engine.subscribe(SUBJECTS.asks(MINE), cb=answer)
        await engine.flush()
        heard = []

        async def note(msg):
            heard.append(msg)

        inbox = router.new_inbox()
        await router.subscribe(inbox, cb=note)
        await router.publish(SUBJECTS.asks(MINE), b"ask", reply=inbox)
        await until(lambda: len(heard) == 100, "all of it is there", timeout_s=5)
        assert not made["engine"].refused


async def test_what_is_refused_is_named_once(tmp_path, caplog):
    async with guarded(tmp_path, "nkeys") as (url, options):
        settings = NatsSettings(servers=(url,), nkey_file=Path(options["engine"]["nkeys_seed"]))
        connection = NatsConnection(settings, "engine")
        connection.start()
        try:
            for subject in (SUBJECTS.events(THEIRS), "_INBOX.x.one", "_INBOX.x.two"):
                for _ in range(2):
                    await asyncio.wrap_future(connection.submit(published(connection, subject)))
            expected = (f"publish {SUBJECTS.events(THEIRS).lower()}", "publish _inbox.x.>")
            await until(lambda: connection.refused == expected, "it is refused")
            await asyncio.wrap_future(
                connection.submit(published(connection, SUBJECTS.asks(THEIRS), listens=True))
            )
            expected = (*expected, f"subscription {SUBJECTS.asks(THEIRS).lower()}")
            await until(lambda: connection.refused == expected, "it is refused")
        finally:
            connection.stop()
    named = [each.getMessage() for each in caplog.records if "does not allow" in each.getMessage()]
    assert len(named) == 3
    assert named[0].endswith("expected permissions as in docs/security.md, NATS")


async def published(connection, subject, *, listens=False):
    client = await connection.connected()
    if listens:
        await client.subscribe(subject)
    else:
        await client.publish(subject, b"")
    await client.flush()


async def test_nobody_comes_in_without_a_key(tmp_path):
    async with guarded(tmp_path, "nkeys") as (url, _):
        client = nats.NATS()
        with pytest.raises(nats.errors.Error):
            await client.connect(url, allow_reconnect=False, error_cb=_pass_over)
        await client.close()


async def _pass_over(error):
    """It is to be refused."""


async def test_a_forwarder_needs_no_more_over_tls(tmp_path):
    make_certificates(tmp_path)
    async with guarded(tmp_path, "nkeys", more=tls_lines(tmp_path)) as (url, options):
        files = {
            "tls_ca_file": tmp_path / "ca.pem",
            "tls_cert_file": tmp_path / "client.pem",
            "tls_key_file": tmp_path / "client-key.pem",
        }
        url = url.replace("nats:", "tls:")
        tls = NatsSettings(servers=(url,), **files).connect_options()["tls"]
        options = {name: {**each, "tls": tls} for name, each in options.items()}
        key = Path(options["engine"]["nkeys_seed"])
        settings = NatsSettings(servers=(url,), nkey_file=key, **files)
        async with clients(url, options) as made:
            await make_streams(made["operator"])
            router, tasks = NatsReader(made["router"].nc, MINE), []
            await router.start(tasks)
            with engine(is_ours=True) as ours:
                ours.store(100, 3)  # before the forwarder is there: the reader has to ask
                with forwarding(settings, ours) as forwarder:
                    await until(lambda: router.names() == ours.held, "all is read")
                    ours.store(200)
                    await until(lambda: router.names() == ours.held, "all is read")
                    assert router.num_asks
                    assert not made["router"].refused
                    assert not forwarder.connection.refused
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_whole_router_needs_no_more(tmp_path):
    async with guarded(tmp_path, "nkeys") as (url, options):
        keys = {name: Path(each["nkeys_seed"]) for name, each in options.items()}
        settings = {name: NatsSettings(servers=(url,), nkey_file=key) for name, key in keys.items()}
        await ensure_streams(settings["operator"])
        with engine(is_ours=True) as ours, forwarding(settings["engine"], ours):
            ours.store(100, 3)
            async with replicating(settings["router"]) as (replica, router, follower):
                await until(lambda: follower.trust.level is Trust.EXACT, "it is exact")
                names = router.index.engine_hashes_of(Rank(WORKER))
                assert {int(name) for name in names} == ours.held
                made = replica.connection.submit(replica._checkpoints.make(replica._freeze))
                assert (await asyncio.wrap_future(made)).object
                assert replica.status.refused == ()
                assert not replica.status.problems


async def ensure_streams(settings):
    """As an operator makes them, once."""
    connection = NatsConnection(settings, "operator")
    connection.start()
    streams = Streams(connection, SUBJECTS, StreamSettings())
    await asyncio.wrap_future(connection.submit(streams.ensure()))
    connection.stop()


@asynccontextmanager
async def replicating(settings):
    """A replica with its router, and the follower of the worker."""
    router = Router(RouterConfig(block_size=4))
    router.add_worker(WORKER)
    replica = Replica(router, ReplicaSettings(nats=settings, router_id="a"))
    thread = EventThread({**TRANSPORTS, "nats": lambda: replica.transport})
    thread.start()
    replica.start(thread)
    try:
        assert await replica.prepared()
        replica.restore()
        follower = Follower(router, Rank(WORKER))
        thread.follow_topic(follower, Topic.parse(f"kv@{MINE}"))
        replica.follow(lambda: [follower])
        yield replica, router, follower
    finally:
        thread.stop()
        await replica.stop()
