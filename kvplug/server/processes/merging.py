"""The metrics of several processes as those of one.

In:  texts of metrics.   Out: their families with joined values; the text of families.

Counters are summed. Of a gauge the largest value counts; those in SUMMED are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan, nan
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SUMMED: Final = frozenset(
    {"kvplug_requests_in_flight", "kvplug_queue_requests", "kvplug_tokenizer_store_bytes"}
)


def merged(texts: list[str]) -> list[Metric]:
    """The metrics of several processes as those of one."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[Any, ...], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            is_sum = family.type != "gauge" or family.name in SUMMED
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = known.get(key, nan)
                if isnan(before):
                    known[key] = sample.value
                elif not isnan(sample.value):
                    known[key] = before + sample.value if is_sum else max(before, sample.value)
    return [_with_values(family, values[name]) for name, family in families.items()]


def _with_values(family: Metric, values: dict[tuple[Any, ...], float]) -> Metric:
    joined = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in values.items():
        joined.add_sample(name, dict(labels), value)
    return joined


def text_of(families: Iterable[Metric]) -> str:
    """Prometheus text format."""
    return generate_latest(_Families(list(families))).decode()


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
