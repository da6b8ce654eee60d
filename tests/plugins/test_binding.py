"""Where the ranks of an engine publish."""

import pytest

from kvplug.engines.binding import endpoint_of_rank
from kvplug.errors import ConfigError


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
