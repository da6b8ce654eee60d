"""The forwarder as a process: its settings, status and end; a router that reads what it says."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress

import pytest
import yaml

from kvplug import Rank, Router, RouterConfig
from kvplug.forwarder.arguments import parse
from kvplug.forwarder.config import ZmqKvEventPublisherConfig
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.topics import Topic
from kvplug.transports import TRANSPORTS
from kvplug.transports.nats import NatsTransport
from tests.documentation import ROOT
from tests.forwarder.engines import BLOCK_SIZE, WORKER, engine
from tests.nats_servers import free_ports, nats_servers
from tests.plugins.nats_reader import make_stream
from tests.waiting import until

RANK = Rank(WORKER)
PAGE = (ROOT / "docs" / "forwarder.md").read_text()
DOCUMENTED = set(re.findall(r"kvplug_forwarder_\w+", PAGE))


class Process:
    """kill, stop; health. One that starts again has its port."""

    def __init__(self, file, url, *engines):
        self.port = free_ports(1)[0]
        self._file = file
        file.write_text(
            yaml.safe_dump(
                {
                    "nats": url,
                    "port": self.port,
                    "engines": [
                        {
                            "worker_id": WORKER, "kv_block_size": BLOCK_SIZE,
                            "zmq_endpoint": each.endpoint,
                            **({"zmq_replay_endpoint": each.replay} if each.replay else {}),
                        }
                        for each in engines
                    ],
                }
            )
        )  # fmt: skip
        self.start()

    def start(self):
        command = [sys.executable, "-m", "kvplug.forwarder", "--config", str(self._file)]
        self.process = subprocess.Popen(command)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def page(self, name):
        with suppress(OSError), urllib.request.urlopen(self.url(name), timeout=5) as answer:
            return answer.read().decode()
        return ""

    def url(self, name):
        return f"http://127.0.0.1:{self.port}/{name}"


@contextmanager
def routing(settings, router_id="a"):
    """A follower of the worker in a router that reads the fleet's stream, and the router."""
    connection = NatsConnection(settings, f"router-{router_id}")
    subjects = Subjects(settings.fleet)
    transport = NatsTransport(connection, subjects, router_id=router_id)
    router = Router(RouterConfig(block_size=BLOCK_SIZE))
    router.add_worker(WORKER)
    thread = EventThread({**TRANSPORTS, "nats": lambda: transport})
    connection.start()
    thread.start()
    try:
        thread.bind("nats://")
        follower = Follower(router, RANK)
        thread.follow_topic(follower, Topic.parse(f"kv@{PublisherName(WORKER, 0)}"))
        transport.start_after(0)
        yield follower, router, connection
    finally:
        thread.stop()
        connection.stop()


async def is_exact(follower, router, engine):
    def is_equal():
        names = {int(name) for name in router.index.engine_hashes_of(RANK)}
        return follower.trust.level is Trust.EXACT and names == engine.held

    await until(is_equal, "the router has all")


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_killed_forwarder_leaves_a_router_stale_and_then_exact(tmp_path, is_ours):
    with nats_servers() as [node], engine(is_ours=is_ours) as one:
        await make_stream(node.url)
        forwarder = Process(tmp_path / "forwarder.yaml", node.url, one)
        try:
            with routing(NatsSettings(servers=(node.url,))) as (follower, router, _):
                await flowing(follower, one)
                await is_exact(follower, router, one)
                forwarder.kill()
                one.store(900, 4)
                one.remove(901)
                await until(lambda: follower.trust.level is Trust.STALE, "it is stale")
                forwarder.start()
                if not is_ours:
                    await flowing(follower, one)
                await is_exact(follower, router, one)
                assert json.loads(forwarder.page("health"))["engines"][WORKER]["connected"]
                page = forwarder.page("metrics")
                assert f'kvplug_forwarder_connected{{worker="{WORKER}"}} 1' in page
                assert set(re.findall(r"^# TYPE (\w+)", page, re.MULTILINE)) == DOCUMENTED
            assert forwarder.stop() == 0
        finally:
            forwarder.kill()


async def flowing(follower, one):
    """Messages of the engine come through: its subscription is known."""
    before = follower.num_messages
    name = 10_000 + len(one.held)

    def has_come():
        one.store(name + one.publisher.num_published)
        return follower.num_messages > before + 1

    await until(has_come, "messages come")


def test_a_file_of_settings_names_the_line_of_what_is_wrong(tmp_path, capsys):
    file = tmp_path / "forwarder.yaml"
    file.write_text("nats: nats://127.0.0.1\nengines:\n- worker_id: a\n  zmq_endpoint: tcp://a:1\n")
    for text, expected in (
        (file.read_text(), ":3: "),
        ("nats: nats://127.0.0.1\nengine:\n- 5,events=tcp://a:1\n", ":3: engine '5,"),
        ("nats: nats://127.0.0.1\nengins: []\n", ":2: unknown key 'engins'; did you mean"),
        ("nats: nats://127.0.0.1\n", "engine: expected one at least"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            parse(["--config", str(file)], {})
        assert expected in capsys.readouterr().err


def test_flags_say_the_same(tmp_path):
    flag = "http://a:1/,events=tcp://a:5557,block_size=16,dp_size=2,local_indexer=off"
    config, level = parse(["--nats", "nats://b:4222", "--engine", flag], {})
    [one] = config.engines
    assert (one.worker_id, one.ranks, level) == ("http://a:1", (0, 1), "info")
    assert one.endpoints_of(1) == ("tcp://a:5558", None)
    assert not one.enable_local_indexer
    assert ZmqKvEventPublisherConfig.parse(one.text) == one
