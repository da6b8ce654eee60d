"""Finding: one thing that is wrong with one worker, and how findings read in a terminal.

docs/troubleshooting.md explains each code; tests/server/diagnosis/test_docs.py holds it to that.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

CLUSTER = "cluster"
_MAX_WIDTH = 110
_LABELS = ("expected", "seen", "fix")


class Code(StrEnum):
    """The causes that are known by name."""

    WORKER_DOWN = "worker_down"
    WORKER_UNKNOWN = "worker_unknown"
    NO_EVENT_ENDPOINT = "no_event_endpoint"
    EVENTS_OFF = "events_off"
    EVENTS_DISCONNECTED = "events_disconnected"
    TOPIC = "topic"
    NO_EVENTS = "no_events"
    PROTOCOL_VERSION = "protocol_version"
    EVENTS_SKIPPED = "events_skipped"
    EVENTS_INCOMPLETE = "events_incomplete"
    REPLAY_OFF = "replay_off"
    EVENT_FORMAT = "event_format"
    BLOCK_SIZE = "block_size"
    CACHE_CAPACITY = "cache_capacity"
    PREFIX_CACHING_OFF = "prefix_caching_off"
    HASH_MISMATCH = "hash_mismatch"
    NEVER_MATCHES = "never_matches"
    TOKENIZER = "tokenizer"
    NO_TOKENIZER = "no_tokenizer"
    MODEL = "model"
    ENGINE_VERSION = "engine_version"
    DATA_PARALLEL = "data_parallel"
    NO_CACHED_TOKENS = "no_cached_tokens"
    CONTRADICTED = "contradicted"
    INCORRECT_ROUTING = "incorrect_routing"
    NATS_AWAY = "nats_away"
    NATS_REFUSED = "nats_refused"
    NATS_STREAM = "nats_stream"
    SNAPSHOT_FAILED = "snapshot_failed"
    SNAPSHOT_UNUSABLE = "snapshot_unusable"
    BEHIND = "behind"
    ROUTER_ID = "router_id"


class Finding(msgspec.Struct, frozen=True):
    """What was expected of a worker, what was seen, and what to do about it.

    worker: CLUSTER for what is wrong between routers.
    """

    worker: str
    code: Code
    expected: str
    seen: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: expected {self.expected}, seen {self.seen}; {self.fix}"


def table_of(findings: Sequence[Finding]) -> str:
    """A heading per worker, a block per finding; a sentence if there are none."""
    if not findings:
        return "nothing found"
    width = min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
    return "\n".join(_lines(findings, width))


def _lines(findings: Sequence[Finding], width: int) -> Iterator[str]:
    worker = None
    for finding in findings:
        if finding.worker != worker:
            worker = finding.worker
            yield worker
        yield f"  {finding.code}"
        for label in _LABELS:
            yield from textwrap.wrap(
                getattr(finding, label),
                width=width,
                initial_indent=f"    {label:<9} ",
                subsequent_indent=" " * 14,
                break_on_hyphens=False,
            )
