"""The audit as Prometheus metrics.

In:  the ledger of each rank.   Out: metric families; `worker` is the rank (URL, or URL#1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvplug.audit.ledger import RankLedger
from kvplug.events import Rank

Ledgers = Mapping[Rank, RankLedger]


def families_of(ledgers: Ledgers) -> Iterator[Metric]:
    """All families; those of a fleet without requests have no samples."""
    yield from _counts(ledgers)
    yield _errors(ledgers)
    yield from _rates(ledgers)


def _counts(ledgers: Ledgers) -> Iterator[Metric]:
    text = "requests whose prediction was compared with the answer, by verdict"
    audited = CounterMetricFamily("kvplug_audited", text, labels=["worker", "verdict"])
    text = "requests that could not be audited, by reason"
    skipped = CounterMetricFamily("kvplug_not_audited", text, labels=["worker", "reason"])
    for rank, ledger in ledgers.items():
        for verdict, count in ledger.num_by_verdict.items():
            audited.add_metric([str(rank), verdict.value], count)
        for reason, count in ledger.num_skipped.items():
            skipped.add_metric([str(rank), reason], count)
    yield from (audited, skipped)


def _errors(ledgers: Ledgers) -> Metric:
    text = "predicted less reported cached blocks; above 0 the worker had less than predicted"
    family = HistogramMetricFamily("kvplug_prediction_error_blocks", text, labels=["worker"])
    for rank, ledger in ledgers.items():
        if ledger.num_audited:
            # A sum of errors of both signs says nothing: Prometheus leaves it out then.
            family.add_metric([str(rank)], ledger.error_histogram, None)
    return family


def _rates(ledgers: Ledgers) -> Iterator[Metric]:
    text = "share of incorrectly routed requests among the last 1024 audited"
    incorrect = GaugeMetricFamily("kvplug_incorrect_routing_rate", text, labels=["worker"])
    text = "share of the predicted blocks that the worker had, over the last 256 audited"
    accuracy = GaugeMetricFamily("kvplug_prediction_accuracy", text, labels=["worker"])
    for rank, ledger in ledgers.items():
        if ledger.num_audited:
            incorrect.add_metric([str(rank)], ledger.incorrect_rate)
        accuracy.add_metric([str(rank)], ledger.accuracy)
    yield from (incorrect, accuracy)
