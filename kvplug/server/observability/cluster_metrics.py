"""What /metrics says of the router among others.

In:  the status of its replica and of its sync.   Out: families of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvplug.cluster.replica_status import ReplicaStatus
    from kvplug.server.clustering import Cluster

_GAUGES: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "kvplug_nats_connected": ("1 while a NATS server is connected", lambda s: s.is_connected),
    "kvplug_replica_ready": (
        "1 once the router knows what the stream had when it started",
        lambda s: s.is_ready,
    ),
    "kvplug_replicas": ("other routers that are there", lambda s: len(s.replicas)),
    "kvplug_stream_lag_messages": (
        "messages of the stream that are not applied",
        lambda s: s.lag_messages,
    ),
    "kvplug_stream_lag_seconds": (
        "for how long there have been messages that are not applied",
        lambda s: s.lag_s,
    ),
    "kvplug_stream_messages": (
        "messages that the stream keeps",
        lambda s: 0 if s.stream is None else s.stream.num_messages,
    ),
    "kvplug_stream_bytes": (
        "their size",
        lambda s: 0 if s.stream is None else s.stream.num_bytes,
    ),
    "kvplug_snapshot_generation": (
        "generation of the snapshots; it rises with --router-reset-states, and when the stream "
        "was made anew",
        lambda s: s.generation,
    ),
    "kvplug_snapshot_sequence": (
        "up to which message of the stream the last snapshot goes",
        lambda s: s.snapshot_seq or 0,
    ),
    "kvplug_snapshot_bytes": ("size of the last snapshot", lambda s: s.snapshot_bytes or 0),
}
_COUNTERS: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "kvplug_nats_reconnects": ("connections that were lost", lambda s: s.num_reconnects),
    "kvplug_stream_consumers_made": (
        "durable consumers that this router made, one after another",
        lambda s: s.num_consumers,
    ),
    "kvplug_stream_rewinds": (
        "times that the stream was new or had lost its end",
        lambda s: s.num_rewound,
    ),
    "kvplug_late_beats": (
        "beats of engines that waited 1 s for events of the stream that they count",
        lambda s: s.num_late_beats,
    ),
    "kvplug_snapshots_made": ("snapshots that this router made", lambda s: s.num_snapshots),
}


class ReplicaMetrics(Collector):
    """Of one router."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        """Read now."""
        status = self._cluster.replica.status
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, read(status))
        for name, (text, read) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, read(status))
        if (embedded := self._cluster.embedded) is not None:
            text = "times that the embedded nats-server ended and was started again"
            yield CounterMetricFamily("kvplug_nats_server_restarts", text, embedded.num_restarts)
        yield from self._of_sync()

    def _of_sync(self) -> Iterator[Metric]:
        """Nothing without --router-replica-sync."""
        if self._cluster.sync is None:
            return
        status = self._cluster.sync.status()
        text = "other routers whose load is heard"
        yield GaugeMetricFamily("kvplug_sync_peers", text, len(status.peers))
        text = "other routers that are not heard, for which the own load counts, too"
        yield GaugeMetricFamily("kvplug_sync_assumed_replicas", text, status.num_assumed)
        text = "messages about load between routers, by what became of them"
        family = CounterMetricFamily("kvplug_sync_messages", text, labels=["what"])
        for what, count in msgspec.structs.asdict(status.counts).items():
            family.add_metric([what], count)
        yield family
