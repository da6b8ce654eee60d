"""A publisher of the plug-ins without an engine: it says what a test has it say.

In:  an endpoint, what its hellos say, keys.   Out: an EventStream; `note` says more.
"""

import logging
from contextlib import contextmanager

from examples.launch.ports import free_ports
from kvplug.engines.event_stream import EventStream
from kvplug.engines.settings import PublisherConfig
from kvplug.protocol import WorkerHello

logger = logging.getLogger(__name__)


def free_endpoint():
    """The ports above it are free, too."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def next_port(endpoint):
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"


@contextmanager
def publishing(endpoint=None, keys=None, **about):
    stream = EventStream(
        PublisherConfig(endpoint=endpoint or free_endpoint()),
        WorkerHello(**{"block_size": 4} | about),
        lambda batch: batch,
        logger,
        keys=keys,
        must_bind=True,
    )
    try:
        yield stream
    finally:
        stream.shutdown()
