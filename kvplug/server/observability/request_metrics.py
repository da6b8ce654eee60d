"""Times of requests, and the load of ranks, as Prometheus metrics.

In:  the histograms that journeys fill; the router's load.   Out: metric families.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvplug.events import Rank
from kvplug.kernels import costing
from kvplug.router.core import Router
from kvplug.server.observability.histogram import Histogram
from kvplug.server.observability.journey import RequestTimes

_LOAD: Final = {
    "kvplug_load_requests": ("requests in flight on the rank", costing.NUM_RUNNING),
    "kvplug_load_waiting_requests": ("those without a first token", costing.NUM_WAITING),
    "kvplug_load_prefill_tokens": ("prompt tokens to be computed there", costing.PREFILL_TOKENS),
    "kvplug_load_active_blocks": (
        "distinct blocks of the prompts in flight there",
        costing.ACTIVE_BLOCKS,
    ),
}


def times_of(times: RequestTimes) -> Iterator[Metric]:
    """Of all requests so far."""
    text = "what a step of a request took"
    steps = HistogramMetricFamily("kvplug_request_step_seconds", text, labels=["step"])
    for step, histogram in times.steps.items():
        steps.add_metric([step.value], histogram.buckets, histogram.total)
    yield steps
    text = "from a request's head to the first event of its stream, as the client gets it"
    yield _family("kvplug_time_to_first_token_seconds", text, times.first_token)
    text = "mean time between the tokens of a stream"
    yield _family("kvplug_inter_token_seconds", text, times.token_gap)
    text = "from a request's head to the end of its answer"
    yield _family("kvplug_request_seconds", text, times.whole)
    text = "share of a prompt's tokens that were expected in the worker's cache"
    yield _family("kvplug_predicted_cached_share", text, times.cached_share)
    text = "requests that are over, by the status of the answer; 499: the client left"
    answers = CounterMetricFamily("kvplug_answers", text, labels=["status"])
    for status, count in sorted(times.num_by_status.items()):
        answers.add_metric([str(status)], count)
    yield answers


def load_of(router: Router, ranks: Iterable[Rank]) -> Iterator[Metric]:
    """Of each rank, as the next decision counts it."""
    numbers, array = router.fleet_index.numbers, router.load.ranks
    rows = {str(rank): array[numbers.number_of(rank)] for rank in ranks if rank in numbers}
    for metric, (text, column) in _LOAD.items():
        family = GaugeMetricFamily(metric, text, labels=["worker"])
        for name, row in rows.items():
            family.add_metric([name], row[column])
        yield family


def _family(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets, sum_value=histogram.total)
