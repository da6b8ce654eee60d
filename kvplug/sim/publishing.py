"""The publishers of a simulated engine, one for each data-parallel rank, on either wire.

In:  a SimConfig.   Out: publishers that take event batches, and what they say of the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from msgspec import structs

from kvplug import codec
from kvplug._version import __version__
from kvplug.engines.event_stream import EventStream
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.protocol import WorkerHello
from kvplug.sim.engine_config import SimConfig

logger = logging.getLogger(__name__)


def open_publishers(config: SimConfig, tokenizer: str) -> Iterator[Publisher | EventStream]:
    """Rank by rank, publish from now on. TransportError if an endpoint is taken.

    `tokenizer`: the digest of tokenizer.json, "" without one.
    """
    if config.events_endpoint is None:
        return
    settings = PublisherConfig(
        endpoint=config.events_endpoint,
        replay_endpoint=config.replay_endpoint,
        topic=config.topic,
        buffer_steps=config.buffer_steps,
    )
    for rank in range(config.dp_size):
        yield _open(config, settings, rank, tokenizer)


def _open(
    config: SimConfig, settings: PublisherConfig, rank: int, tokenizer: str
) -> Publisher | EventStream:
    if config.wire == "kvplug":
        about = _about(config, rank, tokenizer)
        return EventStream(settings, about, lambda batch: batch, logger, must_bind=True)
    return Publisher(
        settings,
        rank,
        lambda batch: codec.encode(structs.replace(batch, dp_rank=rank)),
        logger,
        must_bind=True,
    )


def _about(config: SimConfig, rank: int, tokenizer: str) -> WorkerHello:
    """Without the URL, which is known when the engine listens."""
    return WorkerHello(
        engine="kvplug.sim",
        engine_version=__version__,
        kvplug_version=__version__,
        model=config.served_model_name,
        block_size=config.scheduler.block_size,
        tokenizer=tokenizer,
        capacity_blocks=config.scheduler.num_gpu_blocks - 1,  # without the null block
        dp_rank=rank,
        dp_size=config.dp_size,
    )
