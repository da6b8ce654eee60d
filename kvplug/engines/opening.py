"""The publisher of an engine, on the wire that it is told.

In:  settings, what to say of the engine, its batches to bytes of the stock format.
Out: an EventStream or a Publisher: publish, shutdown, endpoint, answers_at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvplug import codec
from kvplug.engines.event_stream import EventStream
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig, PublisherVariables, without_open_socket
from kvplug.protocol import WorkerHello


def open_publisher(
    config: PublisherConfig,
    about: WorkerHello,
    encode: Callable[[Any], bytes],
    logger: logging.Logger,
    variables: PublisherVariables,
) -> EventStream | Publisher:
    """Publish from now on. An engine's batch is read as it would be off the stock wire, so both
    wires mean the same.
    """
    config = without_open_socket(config, variables.keys, logger)
    if variables.wire == "vllm":
        return Publisher(config, about.dp_rank, encode, logger, keys=variables.keys)
    return EventStream(
        config,
        about,
        lambda batch: codec.decode(encode(batch)),
        logger,
        keys=variables.keys,
    )
