"""Where the ranks of an engine publish: what settings say, and what engines say."""

import json

import pytest

from kvplug.nats.subjects import PublisherName
from kvplug.server.config import WorkerSpec
from kvplug.server.workers.rank_sources import RankSource, of_sglang, of_vllm, sources_of
from kvplug.transports import TRANSPORTS
from kvplug.transports.memory import MemoryTransport

URL = "http://10.0.0.7:8000"
REPLAYED = RankSource(1, "tcp://10.0.0.7:5558", "tcp://10.0.0.7:6558")


def vllm(*endpoints, first_rank=0, **more):
    """The answer of vLLM 0.32 to GET /kv_event_sources."""
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "", **more}
    return json.dumps(
        {str(first_rank + i): {**publisher, "endpoint": each} for i, each in enumerate(endpoints)}
    ).encode()


def sglang(**more):
    """That of SGLang 0.5.23 to GET /server_info."""
    described = {
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 6557,
    }
    return json.dumps({"page_size": 16, "dp_size": 2, "kv_events": described} | more).encode()


def sources(found=(), **settings):
    return sources_of(WorkerSpec(url=URL, **settings), found)


def test_an_engine_that_says_nothing_has_one_rank_and_no_endpoint():
    assert sources() == [RankSource()]


def test_settings_alone():
    spec = {"events": "tcp://h:5557", "replay": "tcp://h:6557"}
    assert sources(**spec) == [RankSource(None, "tcp://h:5557", "tcp://h:6557")]
    assert sources(**spec, dp_size=2) == [
        RankSource(0, "tcp://h:5557", "tcp://h:6557"),
        RankSource(1, "tcp://h:5558", "tcp://h:6558"),
    ]


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
def test_the_url_says_the_host_of_a_wildcard(wildcard):
    found = of_vllm(vllm(f"tcp://{wildcard}:5557", f"tcp://{wildcard}:5558"))
    assert [each.events for each in sources(found)] == [
        "tcp://10.0.0.7:5557",
        "tcp://10.0.0.7:5558",
    ]
    of_ipv6 = sources_of(WorkerSpec(url="http://[fe80::1]:8000"), found)
    assert of_ipv6[0].events == "tcp://[fe80::1]:5557"


def test_vllm_says_the_ports_that_it_took():
    found = of_vllm(vllm("tcp://10.1.1.1:40001", "tcp://10.1.1.1:31007", replay_endpoint=None))
    assert [each.events for each in sources(found)] == [
        "tcp://10.1.1.1:40001",
        "tcp://10.1.1.1:31007",
    ]
    forwarded = sources(found, events="tcp://gateway:40001")
    assert [each.events for each in forwarded] == ["tcp://gateway:40001", "tcp://gateway:31007"]


def test_an_engine_that_is_one_rank_of_many_names_its_own():
    [source] = sources(of_vllm(vllm("tcp://*:5560", first_rank=3)))
    assert source == RankSource(3, "tcp://10.0.0.7:5560")


def test_an_engine_without_events():
    assert sources(of_vllm(b"{}")) == [RankSource()]
    off = of_vllm(vllm("tcp://*:5557", publisher="null"))
    assert sources(off) == [RankSource(0)]
    assert sources(of_sglang(sglang(kv_events=None))) == [RankSource(0), RankSource(1)]


def test_sglang_names_the_ports_of_rank_0():
    assert sources(of_sglang(sglang()))[1] == REPLAYED


@pytest.mark.parametrize(
    ("said", "hides_states"),
    [
        ({}, False),
        ({"internal_states": [{"memory_usage": {"token_capacity_swa": None}}]}, False),
        ({"internal_states": [{"memory_usage": {"token_capacity_swa": 4096}}]}, True),
        ({"internal_states": "unknown", "uses_mamba_radix_cache": False}, False),
        ({"uses_mamba_radix_cache": True, "kv_events": None}, True),
    ],
)
def test_sglang_tells_whether_its_model_has_windows_or_states(said, hides_states):
    found = of_sglang(sglang(**said))
    assert {each.hides_states for each in sources(found)} == {hides_states}
    named = sources(found, events="tcp://h:5557")
    assert {each.hides_states for each in named} == {hides_states}


@pytest.mark.parametrize("endpoint", ["inproc://events", "ipc:///run/events", "tcp://*:0", "*"])
def test_an_endpoint_that_no_other_machine_reaches_is_none(endpoint):
    assert [each.events for each in sources(of_vllm(vllm(endpoint)))] == [None]


@pytest.mark.parametrize("endpoint", ["ipc:///run/events", "memory://engine"])
def test_other_endpoints_are_reached_on_the_same_machine(endpoint, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "memory", MemoryTransport)
    for url, events in (("http://127.0.0.1:8000", endpoint), (URL, None)):
        [source] = sources_of(WorkerSpec(url=url), of_vllm(vllm(endpoint)))
        assert source.events == events


def test_an_endpoint_without_a_transport_is_none():
    spec = WorkerSpec(url="http://127.0.0.1:8000")
    [source] = sources_of(spec, of_vllm(vllm("inproc://events", replay_endpoint="tcp://*:6557")))
    assert source == RankSource(0, None, "tcp://127.0.0.1:6557", unreached="inproc://events")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]"])
def test_a_loopback_endpoint_is_reached_on_the_same_machine_only(host):
    found = of_vllm(vllm(f"tcp://{host}:5557", replay_endpoint=f"tcp://{host}:6557"))
    assert sources(found) == [RankSource(0, unreached=f"tcp://{host}:5557")]
    [source] = sources_of(WorkerSpec(url="http://localhost:8000"), found)
    assert source == RankSource(0, f"tcp://{host}:5557", f"tcp://{host}:6557")
    [named] = sources(found, events="tcp://10.0.0.7:5557")
    assert named == RankSource(0, "tcp://10.0.0.7:5557")


@pytest.mark.parametrize("events", ["tcp://h:65535", "ipc:///run/events"])
def test_further_ranks_have_no_endpoint_if_there_is_no_next_port(events):
    assert [each.events for each in sources(events=events, dp_size=2)] == [events, None]


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (of_vllm, b"[]"),
        (of_vllm, b'{"x": {}}'),
        (of_vllm, b"\xff"),
        (of_sglang, b"{}"),
        (of_sglang, sglang(dp_size=0)),
        (of_sglang, sglang(dp_size=2000)),
        (of_sglang, sglang(kv_events={"endpoint_host": "*"})),
    ],
)
def test_what_is_no_such_answer_is_a_value_error(read, body):
    with pytest.raises(ValueError, match=r".+"):
        read(body)


def over_nats(found=(), **settings):
    made = sources_of(WorkerSpec(url=URL, **settings), found, has_nats=True)
    return [(each.over_nats, each.engine_rank) for each in made]


OWN = PublisherName(URL, 0)


def test_over_nats_a_worker_has_the_name_of_its_url():
    assert over_nats() == over_nats(of_vllm(b"{}")) == [(OWN, None)]
    assert over_nats(dp_size=2)[1] == (PublisherName(URL, 1), 1)
    assert over_nats(of_sglang(sglang(kv_events=None)))[1] == (PublisherName(URL, 1), 1)
    assert over_nats(topic="pod/1") == [(PublisherName("pod/1", 0), None)]


def test_an_engine_says_what_it_is_called_on_nats():
    found = of_vllm(vllm("nats://pod-7/2"))
    assert over_nats(found) == [(PublisherName("pod-7", 2), 0)]
    assert over_nats(found, topic="x") == [(PublisherName("x", 0), 0)]
    assert over_nats(found, events="nats") == [(PublisherName("pod-7", 2), 0)]
    assert sources(found) == [RankSource(0, unreached="nats://pod-7/2")]


def test_what_is_reached_is_followed_directly():
    reached = of_vllm(vllm("tcp://10.0.0.7:5557"))
    assert over_nats(reached) == [(None, 0)]
    assert over_nats(events="tcp://h:5557") == [(None, None)]
    assert over_nats(of_vllm(vllm("tcp://127.0.0.1:5557"))) == [(OWN, 0)]
    assert over_nats(reached, events="nats") == [(OWN, 0)]
