"""kvplug inside real SGLang: what is published is what is cached, and the engine never suffers."""

import random
import socket
from contextlib import contextmanager

import msgspec
import pytest

from examples.launch.endpoint import LOOPBACK
from kvplug import Rank, Router, RouterConfig
from kvplug.events import Namespace
from kvplug.hashing import as_tokens, seed_of
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from tests.engines.engine_pool import uses
from tests.engines.engine_start import FORKED, STOCK_WIRE
from tests.engines.plugged_sglang import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    PluggedSglang,
    drain,
    plugged_sglang,
)
from tests.plugins.stock_client import StockClient, wait_until
from tests.plugins.stream_client import StreamClient


class Obstructed(PluggedSglang):
    """Somebody has its port for events while it starts."""

    def start(self):
        port = int(self.server.events_endpoint.rpartition(":")[2])
        self._obstacle = socket.create_server((LOOPBACK, port))
        super().start()

    def wait_ready(self):
        with self._obstacle:
            super().wait_ready()


# One makes its processes as SGLang does; the others fork them, which is soon done.
PUBLISHING = plugged_sglang("publishing", env=STOCK_WIRE)
TWO_RANKS = plugged_sglang("two-ranks", dp_size=2, env={**FORKED, **STOCK_WIRE})
OBSTRUCTED = plugged_sglang("obstructed", Obstructed, env={**FORKED, **STOCK_WIRE})
OURS = plugged_sglang("ours")


def kvplug_and_stock(events_format):
    return [
        plugged_sglang(
            name, is_stock=is_stock, events={"format": events_format}, env={**FORKED, **STOCK_WIRE}
        )
        for name, is_stock in [("kvplug", False), ("stock", True)]
    ]


@contextmanager
def following(engine, *, dp_size=1):
    """A router, and the followers that feed it: one for each rank."""
    router = Router(RouterConfig(block_size=BLOCK_SIZE))
    router.add_worker("engine", dp_size=dp_size)
    followers = [Follower(router, Rank("engine", rank)) for rank in range(dp_size)]
    host, _, port = engine.server.events_endpoint.rpartition(":")
    listener = EventThread()
    listener.start()
    try:
        for rank, follower in enumerate(followers):
            listener.follow(follower, f"{host}:{int(port) + rank}", "kv@")
        wait_until(lambda: all(f.connected for f in followers), "the event streams are connected")
        yield router, followers
    finally:
        listener.stop()


def settle(engine, followers):
    """Wait until every batch of what the engine did so far has arrived."""
    for rank, follower in enumerate(followers):
        last = drain(engine, rank) - 1
        wait_until(lambda f=follower, n=last: f.sequencer.last == n, "every batch has arrived")


def apart(engine, router, rank=0):
    """(blocks that only the engine has, blocks that only the index has)."""
    in_engine, in_index = engine.cached_blocks(rank), blocks_in_index(router, rank)
    return len(in_engine - in_index), len(in_index - in_engine)


def tokens(rnd, count):
    return [rnd.randrange(10, 4000) for _ in range(count)]


def workload(engine, rnd, *, num_rounds=40):
    """Shared prefixes, evictions, duplicates that start together, a salt, flushes."""
    prefixes = [tokens(rnd, 256) for _ in range(6)]
    for round_ in range(num_rounds):
        tail, reference = tokens(rnd, rnd.randrange(1, 90)), tokens(rnd, 160)
        engine.generate(
            [rnd.choice(prefixes) + tail, reference, reference],
            max_tokens=rnd.choice([1, 40]),
            salt=rnd.choice([None, None, "tenant"]),
        )
        if round_ in (9, 19):
            engine.server.empty_cache()


def predicted(router, prompt, salt):
    """Cached tokens that the index expects: SGLang always computes the last token itself."""
    seed = seed_of(Namespace("", salt or ""))
    hashes = router.index.hasher.sequence_hashes(as_tokens(prompt), seed)
    [depth] = router.index.overlap(hashes, now_s=0.0).depth
    return min(int(depth), (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE


def blocks_in_index(router, rank=0):
    with router.locked():  # or an event that comes meanwhile would look like damage
        router.index.check()
        return {int(name) for name in router.index.engine_hashes_of(Rank("engine", rank))}


@uses(PUBLISHING)
def test_sglang_publishes_what_it_caches(engine):
    with following(engine) as (router, [follower]):
        workload(engine, random.Random(7))
        settle(engine, [follower])
        assert apart(engine, router) == (0, 0)
        assert len(engine.cached_blocks()) > NUM_BLOCKS // 2
        oracle = engine.ask_oracle()
        assert oracle["publisher"] == "KvplugEventPublisher"
        assert not oracle["numba_is_loaded"]
        assert oracle["num_events"]["BlockRemoved"] > 20
        assert oracle["num_events"]["AllBlocksCleared"] == 3  # one is the first of every server
        assert (follower.sequencer.num_missed, dict(follower.skipped)) == (0, {})
        check_predictions(engine, router, follower)
        check_discovery(engine, oracle)
        check_replay(engine)


def joined(engine):
    """A client of our wire that knows what there is."""
    client = StreamClient(BLOCK_SIZE, "kv@")
    hello = client.join(engine.server.events_endpoint)
    client.catch_up(hello.about.answers_at)
    return client


@uses(OURS)
def test_our_wire_says_what_sglang_caches_and_what_it_is(engine):
    client = joined(engine)
    workload(engine, random.Random(7), num_rounds=25)
    drain(engine)

    def is_equal():
        client.follow_to_hello()
        return client.names() == engine.cached_blocks()

    wait_until(is_equal, "both hold the same")
    late = joined(engine)
    assert late.names() == client.names()
    assert len(late.names()) > NUM_BLOCKS // 4
    assert not engine.ask_oracle()["numba_is_loaded"]
    about = late.about
    assert (about.engine, about.engine_version) == ("sglang", "0.5.23")
    assert (about.model, about.block_size, about.url) == (
        "tiny-llama", BLOCK_SIZE, engine.server.url,
    )  # fmt: skip
    assert (about.dp_rank, about.dp_size, about.hides_states) == (0, 1, False)
    assert (about.capacity_blocks, about.defects) == (NUM_BLOCKS, {})
    source = engine.ask_oracle()["source"]
    assert source["replay_endpoint"] == about.answers_at
    for each in (client, late):
        each.close()


@uses(TWO_RANKS)
def test_data_parallel_ranks_have_ports_of_their_own(engine):
    with following(engine, dp_size=2) as (router, followers):
        workload(engine, random.Random(11), num_rounds=25)
        settle(engine, followers)
        assert [apart(engine, router, rank) for rank in range(2)] == [(0, 0), (0, 0)]
        assert all(len(engine.cached_blocks(rank)) > NUM_BLOCKS // 4 for rank in range(2))
        assert engine.endpoint.get("/server_info").body["kv_events"]["dp_size"] == 2


def check_predictions(engine, router, follower):
    """Ask again for what is cached and for what is not: the index knows before the engine says."""
    rnd = random.Random(8)
    known = [(list(ids), salt) for ids, salt in sorted(engine.sequences, key=repr)]
    held = [each for each in known if predicted(router, *each)]
    sample = rnd.sample(held, 6) + rnd.sample(known, 4)
    outcomes = []
    for ids, salt in rnd.sample(sample, len(sample)):
        settle(engine, [follower])
        outcomes.append((predicted(router, ids, salt), *engine.generate([ids], salt=salt)))
    assert all(expected == cached for expected, cached in outcomes), outcomes
    assert sum(cached > 0 for _, cached in outcomes) >= 3, outcomes


def check_discovery(engine, oracle):
    server = engine.server
    port, replay_port = (
        int(endpoint.rpartition(":")[2])
        for endpoint in (server.events_endpoint, server.replay_endpoint)
    )
    assert engine.endpoint.get("/server_info").body["kv_events"] == {
        "publisher": "kvplug",
        "endpoint_host": LOOPBACK,
        "endpoint_port_base": port,
        "topic": "kv@sglang@tiny-llama",
        "block_size": BLOCK_SIZE,
        "dp_size": 1,
        "replay_endpoint_port_base": replay_port,
    }
    assert oracle["source"] == {
        "dp_rank": 0,
        "endpoint": server.events_endpoint,
        "topic": "kv@sglang@tiny-llama",
        "block_size": BLOCK_SIZE,
        "replay_endpoint": server.replay_endpoint,
    }


def replayed(engine):
    """[[events, rank], ...] from the engine's first batch on."""
    client = StockClient()
    try:
        messages = client.replay(engine.server.replay_endpoint, first=0)
    finally:
        client.close()
    assert [number for _, number, _ in messages] == list(range(len(messages)))
    return [msgspec.msgpack.decode(payload)[1:] for _, _, payload in messages]


def check_replay(engine):
    batches = replayed(engine)
    assert len(batches) == engine.ask_oracle()["num_batches"]
    assert batches[0] == [[{"type": "AllBlocksCleared"}], 0]


@pytest.mark.parametrize(
    "events_format",
    [pytest.param(each, marks=uses(*kvplug_and_stock(each))) for each in ("dynamo", "default")],
)
def test_the_events_are_those_of_the_stock_publisher(engines, events_format):
    streams = [stream_of(engine) for engine in engines]
    assert streams[0] == streams[1]
    assert len(streams[0]) > 10


def stream_of(engine):
    """All events of a workload, in order: into which batches they fall is a matter of time."""
    rnd = random.Random(9)
    prefix = tokens(rnd, 256)
    for salt in (None, "tenant", None, "tenant", None):
        engine.generate([prefix + tokens(rnd, 60)], max_tokens=8, salt=salt)
        for _ in range(3):
            engine.generate([tokens(rnd, 500)])
    num_batches = drain(engine)
    wait_until(lambda: len(replayed(engine)) == num_batches, "all is sent")
    assert {rank for _, rank in replayed(engine)} == {0}
    return merged(event for events, _ in replayed(engine) for event in events)


def merged(events):
    """SGLang joins neighbours that fall into one batch: join them all."""
    flat = []
    for event in events:
        kind = (event["type"], event.get("medium"), event.get("cache_salt"))
        names, ids = event.get("block_hashes", [None]), event.get("token_ids")
        for place, name in enumerate(names):
            page = ids and ids[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
            parent = (names[place - 1] if place else event["parent_block_hash"]) if ids else None
            flat.append((*kind, name, parent, page))
    return flat


@uses(OBSTRUCTED)
def test_what_is_wrong_around_it_is_named_and_the_engine_serves(engine):
    with following(engine) as (router, followers):  # the engine takes the port once it is free
        workload(engine, random.Random(10), num_rounds=3)
        settle(engine, followers)
        assert apart(engine, router) == (0, 0)
    log = engine.log()
    assert log.count("kvplug: no stream of KV events at") == 1
    assert log.count("Address already in use") == 1


def misconfigured(events, line):
    return pytest.param(line, marks=uses(plugged_sglang("misconfigured", events=events)))


@pytest.mark.parametrize(
    "line",
    [
        misconfigured(
            {"endpoint": "tcp://nowhere"}, "'tcp://nowhere': expected tcp://ADDRESS:PORT"
        ),
        misconfigured({"bind": False}, 'expected "bind" true or left out'),
    ],
)
def test_a_config_that_cannot_work_is_named_and_the_engine_serves(engine, line):
    engine.generate([[10, 11, 12]])
    log = engine.log()
    [named] = [each for each in log.splitlines() if "kvplug: the engine serves without" in each]
    assert line in named
