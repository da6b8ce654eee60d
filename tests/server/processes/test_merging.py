"""The metrics of several processes as one text; what several processes refuse to be."""

import pytest

from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.processes.merging import merged

WORKER = WorkerSpec(url="http://127.0.0.1:1")

ONE = """
# HELP kvplug_requests_total requests
# TYPE kvplug_requests_total counter
kvplug_requests_total{worker="a"} 3.0
kvplug_requests_total{worker="b"} 1.0
# HELP kvplug_worker_up up
# TYPE kvplug_worker_up gauge
kvplug_worker_up{worker="a"} 0.0
# HELP kvplug_requests_in_flight running
# TYPE kvplug_requests_in_flight gauge
kvplug_requests_in_flight 2.0
# HELP kvplug_predicted_ttft_error error
# TYPE kvplug_predicted_ttft_error gauge
kvplug_predicted_ttft_error{worker="a"} NaN
# HELP kvplug_s seconds
# TYPE kvplug_s histogram
kvplug_s_bucket{le="1.0"} 1.0
kvplug_s_bucket{le="+Inf"} 2.0
kvplug_s_count 2.0
kvplug_s_sum 5.0
"""
OTHER = """
# HELP kvplug_requests_total requests
# TYPE kvplug_requests_total counter
kvplug_requests_total{worker="a"} 4.0
# HELP kvplug_worker_up up
# TYPE kvplug_worker_up gauge
kvplug_worker_up{worker="a"} 1.0
# HELP kvplug_requests_in_flight running
# TYPE kvplug_requests_in_flight gauge
kvplug_requests_in_flight 5.0
# HELP kvplug_predicted_ttft_error error
# TYPE kvplug_predicted_ttft_error gauge
kvplug_predicted_ttft_error{worker="a"} 0.25
# HELP kvplug_s seconds
# TYPE kvplug_s histogram
kvplug_s_bucket{le="1.0"} 3.0
kvplug_s_bucket{le="+Inf"} 3.0
kvplug_s_count 3.0
kvplug_s_sum 1.0
"""


def test_counters_are_summed_and_of_gauges_the_largest_counts():
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in merged([ONE, OTHER])
        for sample in family.samples
    }
    assert samples == {
        ("kvplug_requests_total", "a"): 7.0,
        ("kvplug_requests_total", "b"): 1.0,
        ("kvplug_worker_up", "a"): 1.0,
        ("kvplug_requests_in_flight",): 7.0,
        ("kvplug_predicted_ttft_error", "a"): 0.25,
        ("kvplug_s_bucket", "1.0"): 4.0,
        ("kvplug_s_bucket", "+Inf"): 5.0,
        ("kvplug_s_count",): 5.0,
        ("kvplug_s_sum",): 6.0,
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"router": RouterConfig(mode="round_robin")}, "a mode that does not use KV events"),
        ({"router": RouterConfig(use_kv_events=False)}, "a mode that does not use KV events"),
        ({"workers": (WorkerSpec(events="tcp://127.0.0.1:2"),)}, "whose URL only its events say"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_a_sentence(settings, reason):
    with pytest.raises(ConfigError, match=f"processes: expected 1 with .*{reason}.*got 2"):
        ServerConfig(**{"workers": (WORKER,), "processes": 2, **settings})
