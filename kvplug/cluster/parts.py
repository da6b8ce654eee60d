"""Part: what of a replica may fail by itself.

In:  nothing.   Out: names for problems, which need no NATS to be read.
"""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
    """connection: to the servers; stream: of events, and the buckets; consumer: of the stream;
    snapshot: to make one; restore: to begin with one.
    """

    CONNECTION = "connection"
    STREAM = "stream"
    CONSUMER = "consumer"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"
