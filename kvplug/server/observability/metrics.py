"""Prometheus metrics, read off the parts that count when they are scraped.

In:  audit and its router, fleet, proxy, prompts.   Out: the text of /metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvplug.audit.audit import Audit
from kvplug.events import Rank
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.server.api.admission import Admission
from kvplug.server.api.prompts import Prompts
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.observability.audit_metrics import families_of
from kvplug.server.observability.cluster_metrics import ReplicaMetrics
from kvplug.server.observability.journey import RequestTimes
from kvplug.server.observability.request_metrics import load_of, times_of
from kvplug.server.observability.tokenizer_metrics import store_families
from kvplug.server.proxy.forwarding import Proxy, WorkerCounts
from kvplug.server.proxy.listening import Listener
from kvplug.server.workers.fleet import Fleet

if TYPE_CHECKING:
    from kvplug.server.clustering import Cluster

_OF_PROXY: dict[str, tuple[str, Callable[[WorkerCounts], int]]] = {
    "kvplug_requests": ("requests sent to the worker", lambda c: c.num_requests),
    "kvplug_prompt_tokens": ("prompt tokens sent to the worker", lambda c: c.num_prompt_tokens),
    "kvplug_predicted_cached_tokens": (
        "prompt tokens that the router expected in the worker's cache",
        lambda c: c.num_cached_tokens,
    ),
    "kvplug_requests_lost": ("requests that the worker did not answer", lambda c: c.num_lost),
    "kvplug_requests_broken": ("answers that ended halfway", lambda c: c.num_broken),
    "kvplug_requests_migrated": (
        "streams that went on at the worker, as another one had broken off",
        lambda c: c.num_migrated,
    ),
    "kvplug_worker_ejections": ("times that the worker was left out", lambda c: c.num_ejections),
}
_OF_FOLLOWER: dict[str, tuple[str, Callable[[Follower], int]]] = {
    "kvplug_event_messages": ("event messages received", lambda f: f.num_messages),
    "kvplug_event_messages_missed": ("event messages missing", lambda f: f.sequencer.num_missed),
    "kvplug_event_restarts": ("engine restarts detected", lambda f: f.sequencer.num_restarts),
    "kvplug_event_replays": ("replays requested", lambda f: f.sequencer.num_replays),
    "kvplug_event_replays_failed": ("replays that failed", lambda f: f.sequencer.num_failures),
    "kvplug_event_messages_recovered": (
        "replayed and applied",
        lambda f: f.sequencer.num_recovered,
    ),
    "kvplug_blocks_stored": ("blocks that the engine stored", lambda f: f.num_stored),
    "kvplug_blocks_removed": ("blocks that the engine removed", lambda f: f.num_removed),
}


class Metrics:
    """render() the current values."""

    def __init__(
        self,
        audit: Audit,
        fleet: Fleet,
        proxy: Proxy,
        prompts: Prompts,
        diagnosis: Diagnosis,
        listener: Listener,
    ) -> None:
        self.headers = {"Content-Type": CONTENT_TYPE_LATEST}
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(audit, fleet, proxy, prompts))
        self._registry.register(_Findings(diagnosis))
        self._registry.register(_Connections(listener))

    def add_times(self, times: RequestTimes) -> None:
        """Of requests; once."""
        self._registry.register(_Times(times))

    def add_replica(self, cluster: Cluster) -> None:
        """Of the router among others."""
        self._registry.register(ReplicaMetrics(cluster))

    def add_queue(self, admission: Admission) -> None:
        """Of requests that wait for their turn."""
        self._registry.register(_Queue(admission))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _Findings(Collector):
    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry that finds no description would collect at once."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        text = "1 while the finding holds, 0 when it is over"
        family = GaugeMetricFamily("kvplug_findings", text, labels=["worker", "code"])
        found = {(finding.worker, finding.code) for finding in self._diagnosis.look()}
        for worker, code in sorted(self._diagnosis.seen):
            family.add_metric([worker, code.value], (worker, code) in found)
        yield family


class _Connections(Collector):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def collect(self) -> Iterator[Metric]:
        text = "client connections refused: no descriptors left, or beyond --max-connections"
        refused = self._listener.num_refused
        yield CounterMetricFamily("kvplug_connections_refused", text, refused)
        text = "requests that are no HTTP"
        malformed = self._listener.malformed.num
        yield CounterMetricFamily("kvplug_requests_malformed", text, malformed)


class _Times(Collector):
    def __init__(self, times: RequestTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        yield from times_of(self._times)


class _Queue(Collector):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        text = "requests that wait for a turn (--max-in-flight)"
        yield GaugeMetricFamily("kvplug_queue_requests", text, self._admission.num_waiting)
        text = "requests refused with 429, by reason"
        family = CounterMetricFamily("kvplug_queue_refused", text, labels=["reason"])
        for reason, count in self._admission.num_refused.items():
            family.add_metric([reason], count)
        yield family


class _Readings(Collector):
    def __init__(self, audit: Audit, fleet: Fleet, proxy: Proxy, prompts: Prompts) -> None:
        self._audit, self._router = audit, audit.router
        self._fleet, self._proxy, self._prompts = fleet, proxy, prompts

    def collect(self) -> Iterator[Metric]:
        yield from self._of_index()
        yield from self._of_workers()
        for name, (text, read) in _OF_PROXY.items():
            family = CounterMetricFamily(name, text, labels=["worker"])
            for url, counts in self._proxy.counts.items():
                family.add_metric([url], read(counts))
            yield family
        yield from self._of_events()
        yield from families_of(self._audit.ledgers())
        yield from store_families(self._prompts)
        yield from load_of(self._router, self._ranks())

    def _of_index(self) -> Iterator[Metric]:
        groups, load = self._router.fleet_index.groups, self._router.load
        labels = ["model", "block_size"]
        blocks = GaugeMetricFamily("kvplug_index_blocks", "distinct blocks indexed", labels=labels)
        nbytes = GaugeMetricFamily("kvplug_index_bytes", "memory of the index", labels=labels)
        text = "speculative blocks: they count as cached because a prompt was routed"
        routed = GaugeMetricFamily("kvplug_routed_blocks", text, labels=labels)
        text = "speculative blocks dropped early because their table was full"
        lost = CounterMetricFamily("kvplug_routed_blocks_lost", text, labels=labels)
        for group in groups:
            of = [group.model, str(group.block_size)]
            blocks.add_metric(of, len(group.index))
            nbytes.add_metric(of, group.index.nbytes)
            routed.add_metric(of, len(group.index.speculative))
            lost.add_metric(of, group.index.speculative.num_lost)
        yield from (blocks, nbytes, routed, lost)
        yield from self._of_bounds()
        yield GaugeMetricFamily("kvplug_requests_in_flight", "requests not finished", len(load))
        expired = "requests that did not finish within --request-expiry-s"
        yield CounterMetricFamily("kvplug_requests_expired", expired, load.num_expired)
        text = "requests routed by load alone, as their text could not be tokenized"
        family = CounterMetricFamily("kvplug_requests_untokenized", text, labels=["model"])
        for model, count in self._prompts.untokenized.items():
            family.add_metric([model], count)
        yield family
        text = "requests routed without knowing what is cached of them, by reason"
        family = CounterMetricFamily("kvplug_requests_without_prefix", text, labels=["reason"])
        for reason, count in self._prompts.without_prefix.items():
            family.add_metric([reason], count)
        yield family

    def _of_bounds(self) -> Iterator[Metric]:
        labels = ["model", "block_size"]
        text = "blocks that the index dropped to stay within its bounds"
        blocks = CounterMetricFamily("kvplug_index_evicted_blocks", text, labels=labels)
        text = "pairs of block and holder that the index dropped to stay within its bounds"
        pairs = CounterMetricFamily("kvplug_index_evicted_memberships", text, labels=labels)
        for group in self._router.fleet_index.groups:
            lost = group.index.capacity_guard.stats
            blocks.add_metric([group.model, str(group.block_size)], lost.num_blocks)
            pairs.add_metric([group.model, str(group.block_size)], lost.num_memberships)
        yield from (blocks, pairs)

    def _of_workers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvplug_worker_up", "1 if the worker is up", labels=["worker"])
        for worker in self._fleet.workers.values():
            up.add_metric([worker.name], worker.is_up)
        yield up
        yield from self._of_caches()

    def _of_caches(self) -> Iterator[Metric]:
        text = "blocks in the worker's GPU memory"
        resident = GaugeMetricFamily("kvplug_cache_blocks", text, labels=["worker"])
        text = "blocks that it has room for, as the engine says or as its evictions show"
        capacity = GaugeMetricFamily("kvplug_cache_capacity_blocks", text, labels=["worker"])
        text = "mean error of the predicted time to first token, as a share of it"
        error = GaugeMetricFamily("kvplug_predicted_ttft_error", text, labels=["worker"])
        for rank in self._ranks():
            size = self._router.cache_size(rank)
            resident.add_metric([str(rank)], size.num_resident)
            if size.capacity:
                capacity.add_metric([str(rank)], size.capacity)
            error.add_metric([str(rank)], self._router.model_quality(rank).first_token_error)
        yield from (resident, capacity, error)

    def _of_events(self) -> Iterator[Metric]:
        ranks = [(str(rank), self._fleet.follower_of(rank)) for rank in self._ranks()]
        followers = [(name, follower) for name, follower in ranks if follower is not None]
        connected = GaugeMetricFamily(
            "kvplug_events_connected", "1 if the event stream is connected", labels=["worker"]
        )
        trust = GaugeMetricFamily(
            "kvplug_trust", "1 for the current level of trust", labels=["worker", "level"]
        )
        skipped = CounterMetricFamily(
            "kvplug_events_skipped",
            "what could not be used, by reason",
            labels=["worker", "reason"],
        )
        for name, follower in followers:
            connected.add_metric([name], follower.connected)
            _add_levels(trust, name, follower.trust.level)
            # A copy, made at once: the event thread adds reasons.
            for reason, count in dict(follower.skipped).items():
                skipped.add_metric([name, reason], count)
        if not self._fleet.uses_events:
            for name, _ in ranks:
                _add_levels(trust, name, self._fleet.trust_without_events.level)
        yield from (connected, trust, skipped, self._lags())
        for metric, (text, read) in _OF_FOLLOWER.items():
            family = CounterMetricFamily(metric, text, labels=["worker"])
            for name, follower in followers:
                family.add_metric([name], read(follower))
            yield family

    def _lags(self) -> Metric:
        text = "from when the last events were sent until they were applied"
        family = GaugeMetricFamily("kvplug_event_lag_seconds", text, labels=["worker"])
        for rank in self._ranks():
            if (lag_s := self._audit.event_lag_s(rank)) is not None:
                family.add_metric([str(rank)], lag_s)
        return family

    def _ranks(self) -> list[Rank]:
        """Of all workers; `worker` is the rank in what is counted by rank (URL, or URL#1)."""
        return [rank for worker in self._fleet.workers.values() for rank in worker.ranks]


def _add_levels(family: GaugeMetricFamily, name: str, current: Trust) -> None:
    for level in Trust:
        family.add_metric([name, level], level is current)
