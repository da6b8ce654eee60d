"""What real engines say of themselves; the bodies are theirs, cut to what is read.

vLLM 0.32.0 and SGLang 0.5.23; tests/engines/test_vllm_diagnosis.py asks a real one.
"""

import json

import pytest

from kvplug.server.diagnosis import facts
from kvplug.server.diagnosis.facts import EngineFacts

SOURCE = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "inproc://events",  # which nobody else can connect to
    "replay_endpoint": "tcp://*:5657",
    "buffer_steps": 10000,
    "hwm": 100000,
    "max_queue_size": 100000,
    "topic": "kv@a@m",
}
METRICS = (
    b'# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="32",'
    b'cache_dtype="auto",enable_prefix_caching="True",engine="0",hash_seed="a \\" quote",'
    b'num_gpu_blocks="160"} 1.0\n'
)
SERVER_INFO = {
    "page_size": 32,
    "max_total_num_tokens": 4096,
    "version": "0.5.23",
    "dp_size": 1,
    "enable_cache_report": True,
    "disable_radix_cache": False,
    "kv_events_config": json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}),
    "kv_events": {"publisher": "zmq", "endpoint_port_base": 9, "topic": "kv", "block_size": 64},
}


def of_server_info(**more):
    return facts.of_server_info(json.dumps(SERVER_INFO | more).encode())


def test_vllm_names_its_version():
    assert facts.of_version(b'{"version": "0.32.0"}') == EngineFacts(
        engine="vllm", version="0.32.0"
    )


@pytest.mark.parametrize(
    ("sources", "publishes", "replays", "num_ranks"),
    [
        ({"0": SOURCE}, True, True, 1),
        ({"0": SOURCE, "1": SOURCE}, True, True, 2),
        ({"0": SOURCE | {"replay_endpoint": None}}, True, False, 1),
        ({"0": SOURCE | {"enable_kv_cache_events": False}}, False, True, 1),
        ({"0": SOURCE | {"publisher": "null"}}, False, True, 1),
        ({"0": SOURCE | {"endpoint": "nats://a/0", "replay_endpoint": None}}, True, None, 1),
        ({}, False, None, None),
    ],
)
def test_vllm_names_its_publishers(sources, publishes, replays, num_ranks):
    said = facts.of_event_sources(json.dumps(sources).encode())
    assert (said.publishes, said.replays, said.num_ranks) == (publishes, replays, num_ranks)


def test_vllm_names_the_settings_of_its_cache():
    assert facts.of_metrics(METRICS) == EngineFacts(
        engine="vllm", block_size=32, num_blocks=159, caches=True, num_ranks=1
    )
    assert facts.of_metrics(b"other_metric 1.0\n") == EngineFacts()


def test_vllm_adds_up_the_blocks_of_its_ranks():
    lines = "".join(
        f'vllm:cache_config_info{{block_size="32",engine="{rank}",num_gpu_blocks="320"}} 1.0\n'
        for rank in range(2)
    )
    said = facts.of_metrics(lines.encode())
    assert (said.num_blocks, said.num_ranks) == (159, 2)


def test_sglang_says_it_all_in_one():
    assert of_server_info() == EngineFacts(
        engine="sglang",
        version="0.5.23",
        block_size=64,
        num_blocks=128,
        caches=True,
        publishes=True,
        replays=False,
        topic="kv",
        event_format="default",
        num_ranks=1,
        reports_cached=True,
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"publisher": "zmq", "format": "dynamo"}, {"event_format": "dynamo", "publishes": True}),
        ({"publisher": "zmq", "replay_endpoint": "tcp://*:1"}, {"replays": True}),
        ({"publisher": "null"}, {"publishes": False, "event_format": None}),
        (None, {"publishes": False}),
        ("no json", {"publishes": False}),
    ],
)
def test_sglang_describes_no_publisher_without_tcp(config, expected):
    text = json.dumps(config) if isinstance(config, dict) else config
    said = of_server_info(kv_events=None, kv_events_config=text)
    assert {name: getattr(said, name) for name in expected} == expected
    assert said.block_size == 32


@pytest.mark.parametrize("read", [facts.of_version, facts.of_event_sources, facts.of_server_info])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"version": 1}', b"<html>"])
def test_what_is_no_answer_is_a_value_error(read, body):
    with pytest.raises(ValueError, match=r"."):
        read(body)


def test_later_answers_complete_earlier_ones():
    both = facts.of_version(b'{"version": "0.32.0"}').merged(facts.of_metrics(METRICS))
    assert both == EngineFacts(
        engine="vllm", version="0.32.0", block_size=32, num_blocks=159, caches=True, num_ranks=1
    )
    assert both.merged(EngineFacts(caches=False)).caches is False
    assert both.merged(EngineFacts()) == both
