"""The publishers of a simulated engine, one for each data-parallel rank, on either wire.

In:  a SimConfig.   Out: publishers that take event batches, and what they say of the engine.

The KVPLUG_* variables of the plug-ins hold here, too, but for the wire, which is a flag. With
$KVPLUG_NATS, events go to NATS servers, under the engine's URL unless $KVPLUG_NATS_WORKER says it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial

from msgspec import structs

from kvplug import codec
from kvplug._version import __version__
from kvplug.curve_keys import ServerKeys
from kvplug.engines.event_stream import EventStream
from kvplug.engines.life_stream import LifeStream
from kvplug.engines.nats_target import NatsTarget
from kvplug.engines.numbered_batches import NumberedBatches
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import (
    WIRE,
    PublisherConfig,
    PublisherVariables,
    read_variables,
    without_open_socket,
)
from kvplug.events import EventBatch
from kvplug.http_service import url_of
from kvplug.protocol import WorkerHello
from kvplug.sim.engine_config import SimConfig

logger = logging.getLogger(__name__)


def open_publishers(config: SimConfig, tokenizer: str) -> Iterator[LifeStream | NumberedBatches]:
    """Rank by rank, publish from now on. TransportError if an endpoint is taken; ConfigError for a
    variable or a key that cannot be used.

    `tokenizer`: the digest of tokenizer.json, "" without one.
    """
    if config.events_endpoint is None:
        return
    variables = read_variables({k: v for k, v in os.environ.items() if k != WIRE})
    settings = PublisherConfig(
        endpoint=config.events_endpoint,
        replay_endpoint=config.replay_endpoint,
        topic=config.topic,
        buffer_steps=config.buffer_steps,
    )
    if variables.nats is None:
        settings = without_open_socket(settings, variables.keys, logger)
    for rank in range(config.dp_size):
        about = _about(config, rank, tokenizer, variables)
        if variables.nats is None:
            yield _open_socket(config.wire, settings, about, variables.keys)
        else:
            yield _open_on_nats(config, about, variables.nats)


def _open_on_nats(
    config: SimConfig, about: WorkerHello, target: NatsTarget
) -> LifeStream | NumberedBatches:
    if not about.url and config.port:  # else it is known when the engine listens
        about = structs.replace(about, url=url_of(config.host, config.port))
    if config.wire == "kvplug":
        return target.open_stream(about, _as_it_is, logger)
    encode = partial(_encode, about.dp_rank)
    return target.open_batches(about, encode, logger, buffer_steps=config.buffer_steps)


def _open_socket(
    wire: str, settings: PublisherConfig, about: WorkerHello, keys: ServerKeys | None
) -> LifeStream | NumberedBatches:
    if wire == "kvplug":
        return EventStream(settings, about, _as_it_is, logger, keys=keys, must_bind=True)
    encode = partial(_encode, about.dp_rank)
    return Publisher(settings, about.dp_rank, encode, logger, keys=keys, must_bind=True)


def _as_it_is(batch: EventBatch) -> EventBatch:
    return batch


def _encode(dp_rank: int, batch: EventBatch) -> bytes:
    return codec.encode(structs.replace(batch, dp_rank=dp_rank))


def _about(
    config: SimConfig, rank: int, tokenizer: str, variables: PublisherVariables
) -> WorkerHello:
    """Without a URL, unless a variable says it: it is known when the engine listens."""
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
        url=variables.url,
        topology=variables.topology,
        cxl_pools=variables.cxl_pools,
    )
