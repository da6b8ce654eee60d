"""kvplug inside real vLLM: what is published is what is cached, and the engine never suffers."""

import random
import socket
from pathlib import Path

import pytest

from examples.launch.engine_env import ensure_vllm
from examples.launch.plugin_env import ensure_plugin
from kvplug._version import __version__
from tests.engines.engine_pool import Recipe, uses
from tests.engines.engine_start import FORKED as FORKED_ENV
from tests.engines.engine_start import STOCK_WIRE
from tests.engines.following import following
from tests.engines.plugged_vllm import BLOCK_SIZE, LOOPBACK, MODEL, PluggedVllm, plugged_vllm
from tests.engines.program import Program
from tests.plugins.stock_client import StockClient, wait_until
from tests.plugins.stream_client import StreamClient


class Obstructed(PluggedVllm):
    """Somebody has its port for events while it starts."""

    def start(self):
        self._obstacle = socket.create_server((LOOPBACK, self.events_port))
        super().start()

    def wait_ready(self):
        with self._obstacle:
            super().wait_ready()


class Refused(PluggedVllm):
    """It gives up while it starts."""

    def wait_ready(self):
        wait_until(lambda: self.process.exit_status is not None, "it gives up", timeout_s=120)


REPLAYING = {"replay_endpoint": "tcp://127.0.0.1:0"}
FORKED, SPAWNED = (
    plugged_vllm(method, env={"ENGINE_START_METHOD": method, **STOCK_WIRE}, events=REPLAYING)
    for method in ("fork", "spawn")
)
TWO_RANKS = plugged_vllm(
    "two-ranks", env={**FORKED_ENV, **STOCK_WIRE}, flags=("--data-parallel-size", "2")
)
OBSTRUCTED = plugged_vllm(
    "obstructed",
    Obstructed,
    env={"KVPLUG_LOG_LEVEL": "loud", "NUMBA_CACHE_DIR": "/proc/not/writable", **STOCK_WIRE},
)
OURS = plugged_vllm("ours", env={**FORKED_ENV, "KVPLUG_TOPOLOGY": "zone=z"})
OUR_RANKS = plugged_vllm("our-ranks", flags=("--data-parallel-size", "2"))
NOWHERE = plugged_vllm("nowhere", events={"endpoint": "tcp://nowhere"})
MISSPELT = plugged_vllm("misspelt", Refused, events={"publisher": "kvplgu"})


def register_in_a_library(folder):
    python = ensure_vllm()
    command = (python, Path(__file__).with_name("vllm_register.py"))
    env = {"PYTHONPATH": str(ensure_plugin(python)), "PATH": "/usr/bin:/bin"}
    return Program("register", command, folder, env={**env, "VLLM_LOGGING_LEVEL": "ERROR"})


REGISTERING = Recipe("register", register_in_a_library)


def workload(engine, rnd, *, num_rounds=30):
    """Shared prefixes, evictions, duplicates that start together (stored twice), resets."""
    prefixes = [[rnd.randrange(10, 4000) for _ in range(256)] for _ in range(6)]
    for round_ in range(num_rounds):
        tail = [rnd.randrange(10, 4000) for _ in range(rnd.randrange(1, 90))]
        reference = [rnd.randrange(10, 4000) for _ in range(160)]
        engine.complete(
            [rnd.choice(prefixes) + tail, reference, reference], max_tokens=rnd.choice([1, 40])
        )
        if round_ in (9, 19):
            wait_until(engine.reset_prefix_cache, "the cache is empty")
    engine.complete([10, 11, 12])  # a last step publishes what waits


def apart(engine, follows, rank=0):
    """(blocks that only the engine has, blocks that only the index has)."""
    in_engine, in_index = set(engine.ask_oracle(rank)["blocks"]), follows.blocks(rank)
    return len(in_engine - in_index), len(in_index - in_engine)


@pytest.mark.parametrize(
    "start_method",
    [pytest.param("fork", marks=uses(FORKED)), pytest.param("spawn", marks=uses(SPAWNED))],
)
def test_vllm_serve_publishes_what_it_caches(engine, start_method):
    with following(engine) as follows:
        workload(engine, random.Random(7))
        follows.settle(engine)
        oracle, [follower] = engine.ask_oracle(), follows.followers
        assert oracle["publisher"] == "KvplugEventPublisher"
        assert not oracle["numba_is_loaded"]
        assert oracle["is_fork"] == (start_method == "fork")
        assert apart(engine, follows) == (0, 0)
        assert len(oracle["blocks"]) > 20
        assert oracle["num_events"]["BlockRemoved"] > 100
        assert oracle["num_events"]["AllBlocksCleared"] == 2
        assert oracle["most_copies"] > 1
        assert (follower.trust.reason, follower.sequencer.num_missed) == (None, 0)
        assert not follower.skipped
        source = engine.event_sources()["0"]
        assert source["publisher"] == "kvplug"
        assert source["endpoint"] == f"tcp://{LOOPBACK}:{engine.events_port}"
        assert num_replayed(source["replay_endpoint"]) == oracle["num_batches"]


def num_replayed(endpoint):
    client = StockClient()
    try:
        return len(client.replay(endpoint, first=0))
    finally:
        client.close()


def joined(engine, rank=0):
    """A client of our wire that knows what there is."""
    client = StreamClient(BLOCK_SIZE, "kv@")
    hello = client.join(engine.event_sources()[str(rank)]["endpoint"])
    client.catch_up(hello.about.answers_at)
    return client


def follow_until_equal(engine, client, rank=0):
    """What the client holds is what the engine has cached; nothing less ends the wait."""

    def is_equal():
        client.follow_to_hello()
        return client.names() == set(engine.ask_oracle(rank)["blocks"])

    wait_until(is_equal, "both hold the same")
    client.index.check()


@uses(OURS)
def test_our_wire_says_what_vllm_caches_and_what_it_is(engine):
    client = joined(engine)
    workload(engine, random.Random(7), num_rounds=15)
    follow_until_equal(engine, client)
    late, oracle = joined(engine), engine.ask_oracle()
    assert late.names() == client.names()
    assert len(oracle["blocks"]) > 20
    assert oracle["most_copies"] > 1
    assert not oracle["numba_is_loaded"]
    about = late.about
    assert (about.engine, about.engine_version.partition("+")[0]) == ("vllm", "0.32.0")
    assert (about.model, about.block_size, about.capacity_blocks) == (MODEL, BLOCK_SIZE, 63)
    assert (about.dp_rank, about.dp_size, about.kvplug_version) == (0, 1, __version__)
    assert (len(about.tokenizer), about.topology, about.defects) == (16, {"zone": "z"}, {})
    assert about.url == engine.url
    source = engine.event_sources()["0"]
    assert source["replay_endpoint"] == about.answers_at
    for each in (client, late):
        each.close()


@uses(OUR_RANKS)
def test_data_parallel_ranks_have_streams_of_our_wire(engine):
    clients = [joined(engine, rank) for rank in range(2)]
    workload(engine, random.Random(8), num_rounds=10)
    for _ in range(2):  # one for each rank: they are given out in turn
        engine.complete([[10, 11, 12]] * 4)
    for rank, client in enumerate(clients):
        follow_until_equal(engine, client, rank)
        assert (client.about.dp_rank, client.about.dp_size) == (rank, 2)
        client.close()


@uses(TWO_RANKS)
def test_data_parallel_ranks_have_ports_of_their_own(engine):
    with following(engine, dp_size=2) as follows:
        workload(engine, random.Random(8))
        for _ in range(2):  # one for each rank: they are given out in turn
            engine.complete([[10, 11, 12]] * 4)
        follows.settle(engine)
        oracles = [engine.ask_oracle(rank) for rank in range(2)]
        assert [len(oracle["blocks"]) > 0 for oracle in oracles] == [True, True]
        assert [apart(engine, follows, rank) for rank in range(2)] == [(0, 0), (0, 0)]
        assert [f.trust.reason for f in follows.followers] == [None, None]
        assert sum(oracle["num_events"]["BlockRemoved"] for oracle in oracles) > 100
        assert {rank: source["endpoint"] for rank, source in engine.event_sources().items()} == {
            str(rank): f"tcp://{LOOPBACK}:{engine.events_port + rank}" for rank in range(2)
        }


@uses(OBSTRUCTED)
def test_what_is_wrong_around_it_is_named_and_the_engine_serves(engine):
    with following(engine) as follows:  # the port is free again, and the engine takes it
        workload(engine, random.Random(9), num_rounds=3)
        follows.settle(engine)
        assert apart(engine, follows) == (0, 0)
    log = engine.log()
    assert log.count("kvplug: KVPLUG_LOG_LEVEL is ignored: expected one of debug, info") == 1
    assert log.count("kvplug: no stream of KV events at") == 1
    assert log.count("Address already in use") == 1
    assert "Traceback" not in log.partition("Application startup complete")[0]
    assert "umba" not in log


@uses(NOWHERE)
def test_an_unusable_endpoint_is_named_and_the_engine_serves_without_events(engine):
    engine.complete([10, 11, 12])
    assert engine.ask_oracle()["publisher"] == "NullEventPublisher"
    [line] = [
        line for line in engine.log().splitlines() if "kvplug: the engine serves without" in line
    ]
    assert "'tcp://nowhere': expected tcp://ADDRESS:PORT" in line


@uses(MISSPELT)
def test_a_misspelt_publisher_is_rejected_by_vllm_itself(engine):
    assert "Input should be 'null', 'zmq' or 'kvplug'" in engine.log()


@uses(REGISTERING)
def test_register_in_a_library(engine):
    """The order of calls that the documentation gives, with vLLM's real classes."""
    assert engine.output().splitlines()[-1:] == ["done"]
