"""What environment variables say to the publisher, and who may read its stream."""

import logging
import os

import pytest

from kvplug.curve_keys import ClientKeys, ServerKeys
from kvplug.engines.about_engine import (
    ADDRESS,
    DP_SIZE,
    about_sglang,
    about_vllm,
    note_address,
    tokenizer_of,
)
from kvplug.engines.event_stream import EventStream
from kvplug.engines.settings import (
    PublisherConfig,
    PublisherVariables,
    read_variables,
    without_open_socket,
)
from kvplug.errors import ConfigError
from kvplug.protocol import WorkerHello
from tests.plugins.stream_client import StreamClient

logger = logging.getLogger("tests.plugins")


def test_nothing_said_is_our_wire_and_nothing_else():
    assert read_variables({}) == PublisherVariables()


def test_all_that_can_be_said():
    said = read_variables(
        {
            "KVPLUG_WIRE": "vllm",
            "KVPLUG_WORKER_URL": "http://a:8000",
            "KVPLUG_CXL_POOLS": "1, 2",
            "KVPLUG_TOPOLOGY": "zone=a, host=b",
            "KVPLUG_RECORDER": "off",
        }
    )
    assert not said.records
    assert (said.wire, said.url, said.cxl_pools) == ("vllm", "http://a:8000", (1, 2))
    assert said.topology == {"zone": "a", "host": "b"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVPLUG_WIRE", "nats"),
        ("KVPLUG_RECORDER", "no"),
        ("KVPLUG_CXL_POOLS", "1,x"),
        ("KVPLUG_CXL_POOLS", "-1"),
        ("KVPLUG_TOPOLOGY", "zone"),
        ("KVPLUG_CURVE_KEY_FILE", "/nowhere/key"),
        ("KVPLUG_CURVE_CLIENTS", "/nowhere"),
    ],
)
def test_what_cannot_be_meant_is_named(name, value):
    with pytest.raises(ConfigError, match=f"{name}|/nowhere/key"):
        read_variables({name: value})


def test_any_address_is_loopback_without_keys_and_the_log_says_how_to_change_it(caplog):
    caplog.set_level(logging.INFO)
    config = PublisherConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:6557")
    local = without_open_socket(config, None, logger)
    assert local.endpoint == "tcp://127.0.0.1:5557"
    assert local.replay_endpoint == "tcp://127.0.0.1:6557"
    [record] = caplog.records
    assert "tcp://0.0.0.0:5557" in record.getMessage()
    assert "KVPLUG_CURVE_KEY_FILE" in record.getMessage()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "ipc:///kv"])
def test_an_address_that_is_named_stays(endpoint, caplog):
    caplog.set_level(logging.INFO)
    config = PublisherConfig(endpoint=endpoint)
    assert without_open_socket(config, None, logger) == config
    assert not caplog.records


class KeyedClient(StreamClient):
    """With a key for each of its sockets, as a context hands them out."""

    def __init__(self, folder, name):
        super().__init__()
        keys = ClientKeys.from_files(folder / f"{name}.key_secret", folder / "server.key")
        self.context.curve_serverkey = keys.server_public
        self.context.curve_publickey = keys.public
        self.context.curve_secretkey = keys._secret


def test_with_keys_any_address_is_any_and_only_who_is_allowed_reads(key_files):
    keys = ServerKeys.from_files(key_files / "server.key_secret", key_files / "allowed")
    config = PublisherConfig(endpoint="tcp://*:0")
    assert without_open_socket(config, keys, logger) == config
    stream = EventStream(config, WorkerHello(model="m"), lambda batch: batch, logger, keys=keys)
    endpoint = stream.endpoint.replace("*", "127.0.0.1")
    answers_at = stream.answers_at.replace("*", "127.0.0.1")
    client, stranger = KeyedClient(key_files, "client"), KeyedClient(key_files, "stranger")
    keyless = StreamClient()
    try:
        hello = client.join(endpoint)
        assert hello.about.model == "m"
        assert hello.about.answers_at == f"tcp://*:{answers_at.rpartition(':')[2]}"
        client.catch_up(answers_at)
        for each in (stranger, keyless):
            with pytest.raises(AssertionError, match="nothing came"):
                each.join(endpoint, limit_ms=300)
    finally:
        for each in (client, stranger, keyless):
            each.close()
        stream.shutdown()


def test_outside_of_an_engine_nothing_is_known_and_nothing_raises(monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    for about in (about_vllm, about_sglang):
        said = about(3, PublisherVariables(url="http://u"))
        assert (said.dp_rank, said.url, said.model, said.block_size) == (3, "http://u", "", None)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (["vllm", "serve", "M", "--host", "10.0.0.1", "--port", "81"], "http://10.0.0.1:81"),
        (["vllm", "serve", "M", "--port=82", "--host=::1"], "http://[::1]:82"),
        (["vllm", "serve", "M"], "http://0.0.0.0:8000"),
        (["vllm", "serve", "M", "--ssl-certfile", "c"], "https://0.0.0.0:8000"),
        (["/v/api_server.py", "--port", "83"], "http://0.0.0.0:83"),
        (["program.py"], None),
        (["vllm", "bench", "serve"], None),
    ],
)
def test_where_the_api_of_vllm_is(arguments, url, monkeypatch):
    monkeypatch.setenv(ADDRESS, "-")  # to be restored
    monkeypatch.setenv(DP_SIZE, "1")
    monkeypatch.delenv(ADDRESS)
    note_address(arguments)
    assert os.environ.get(ADDRESS) == url


def test_how_many_ranks_vllm_has_is_told_to_its_cores(monkeypatch):
    for name in (ADDRESS, DP_SIZE):
        monkeypatch.setenv(name, "-")
        monkeypatch.delenv(name)
    note_address(["vllm", "serve", "M", "--data-parallel-size", "4"])
    assert about_vllm(1, PublisherVariables()).dp_size == 4


def test_a_tokenizer_is_told_by_its_file(tmp_path):
    assert tokenizer_of(str(tmp_path)) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_of(str(tmp_path)) == "44136fa355b3678a"
