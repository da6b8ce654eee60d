"""What a simulated engine counts, under the names of vLLM's Prometheus metrics.

In:  an engine, read when it is scraped.   Out: the text of /metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvplug.sim.engine import SimulatedEngine

HEADERS = {"Content-Type": CONTENT_TYPE_LATEST}


class Metrics:
    """render() the current values."""

    def __init__(self, engine: SimulatedEngine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(engine, model))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    def __init__(self, engine: SimulatedEngine, model: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        cache, scheduler = engine.cache, engine.scheduler
        gauges = {
            "vllm:num_requests_running": len(scheduler.running),
            "vllm:num_requests_waiting": len(scheduler.waiting),
            "vllm:kv_cache_usage_perc": cache.pool.usage,
        }
        counters = {
            "vllm:prefix_cache_queries": cache.num_queried_tokens,
            "vllm:prefix_cache_hits": cache.num_hit_tokens,
            "vllm:num_preemptions": engine.num_preemptions,
            "vllm:prompt_tokens": engine.num_prompt_tokens,
            "vllm:generation_tokens": engine.num_generated_tokens,
        }
        for name, value in gauges.items():
            yield self._gauge(name, value, self._labels)
        for name, value in counters.items():
            family = CounterMetricFamily(name, name, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        yield self._gauge("vllm:cache_config_info", 1, self._cache_config())

    def _cache_config(self) -> dict[str, str]:
        config = self._engine.config
        return {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_gpu_blocks),
            "enable_prefix_caching": "True",
            "engine": "0",
        }

    @staticmethod
    def _gauge(name: str, value: float, labels: dict[str, str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, name, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
