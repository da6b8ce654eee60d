"""What a simulated engine counts, under the names of vLLM's Prometheus metrics.

In:  the engine of each rank, read when it is scraped.   Out: the text of /metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvplug.sim.engine import SimulatedEngine

HEADERS = {"Content-Type": CONTENT_TYPE_LATEST}


class Metrics:
    """render() the current values."""

    def __init__(self, engines: Sequence[SimulatedEngine], model: str) -> None:
        """`engines`: one for each data-parallel rank."""
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(engines, model))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    def __init__(self, engines: Sequence[SimulatedEngine], model: str) -> None:
        self._engines, self._model = engines, model

    def collect(self) -> Iterator[Metric]:
        families = [list(self._families(*each)) for each in enumerate(self._engines)]
        for of_each_rank in zip(*families, strict=True):
            family, *others = of_each_rank
            family.samples += [sample for other in others for sample in other.samples]
            yield family

    def _families(self, rank: int, engine: SimulatedEngine) -> Iterator[Metric]:
        labels = {"model_name": self._model, "engine": str(rank)}
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
            yield self._gauge(name, value, labels)
        for name, value in counters.items():
            family = CounterMetricFamily(name, name, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
        yield self._gauge("vllm:cache_config_info", 1, self._cache_config(rank, engine))

    def _cache_config(self, rank: int, engine: SimulatedEngine) -> dict[str, str]:
        config = engine.config
        return {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_gpu_blocks * len(self._engines)),  # as vLLM 0.32
            "enable_prefix_caching": "True",
            "engine": str(rank),
        }

    @staticmethod
    def _gauge(name: str, value: float, labels: dict[str, str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, name, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
