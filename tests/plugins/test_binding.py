"""Where the ranks of an engine publish."""

import os
import threading

import pytest

from kvplug import KvEventPublisher
from kvplug.curve_keys import ServerKeys
from kvplug.engines.binding import endpoint_of_rank
from kvplug.errors import ConfigError, TransportError
from tests.plugins.stock_client import wait_until

LOOPBACK = "tcp://127.0.0.1:0"


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("endpoint", "dp_rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://127.0.0.1:5557", 1, "tcp://127.0.0.1:5558"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:0", 5, "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:*", 5, "tcp://127.0.0.1:*"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
        ("inproc://kv", 1, "inproc://kv_dp1"),
    ],
)
def test_a_rank_has_a_port_or_a_name_of_its_own(endpoint, dp_rank, expected):
    assert endpoint_of_rank(endpoint, dp_rank) == expected


@pytest.mark.parametrize("endpoint", ["tcp://5557", "tcp://*:", "tcp://*:x", "tcp://*:65535"])
def test_a_tcp_endpoint_without_a_usable_port_is_rejected(endpoint):
    with pytest.raises(ConfigError, match="expected tcp://ADDRESS:PORT"):
        endpoint_of_rank(endpoint, 1)


@pytest.mark.parametrize("wire", ["kvplug", "vllm"])
def test_an_address_that_is_taken_leaves_nothing_open(wire, key_files):
    keys = ServerKeys.from_files(key_files / "server.key_secret", key_files / "allowed")
    with KvEventPublisher(LOOPBACK, kv_block_size=4, keys=keys) as publisher:
        open_before, threads_before = num_descriptors(), threading.active_count()
        for more in ({}, {"keys": keys}, {"answers_at": publisher.endpoint}):
            taken = LOOPBACK if "answers_at" in more else publisher.endpoint
            with pytest.raises(TransportError):
                KvEventPublisher(taken, kv_block_size=4, wire=wire, **more)
        wait_until(lambda: num_descriptors() == open_before, "all is closed")
        assert threading.active_count() == threads_before
