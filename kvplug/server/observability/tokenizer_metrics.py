"""What is remembered of texts, as Prometheus metrics.

In:  the tokenizers that are loaded.   Out: metric families by model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvplug.server.api.prompts import Prompts
from kvplug.tokenization.piece_encoder import StoreCounts

_COUNTS: dict[str, tuple[str, Callable[[StoreCounts], int]]] = {
    "kvplug_tokenized_texts": ("texts that were tokenized", lambda c: c.num_texts),
    "kvplug_tokenized_chars": ("characters of these texts", lambda c: c.num_chars),
    "kvplug_tokenized_chars_known": (
        "characters of these texts that were known from earlier ones",
        lambda c: c.num_chars_known,
    ),
    "kvplug_tokenized_texts_shortened": (
        "texts of which only the known beginning was used (--tokenizer-min-overlap)",
        lambda c: c.num_texts_shortened,
    ),
}


def store_families(prompts: Prompts) -> Iterator[Metric]:
    """Counts of each model's store, and its size."""
    encoders = {model: tokenizer.encoder for model, tokenizer in prompts.loaded}
    for name, (text, read) in _COUNTS.items():
        family = CounterMetricFamily(name, text, labels=["model"])
        for model, encoder in encoders.items():
            family.add_metric([model], read(encoder.counts))
        yield family
    text = "memory of remembered texts and their token ids"
    sizes = GaugeMetricFamily("kvplug_tokenizer_store_bytes", text, labels=["model"])
    for model, encoder in encoders.items():
        sizes.add_metric([model], encoder.num_bytes)
    yield sizes
