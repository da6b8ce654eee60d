"""Finding: one thing that is wrong with one worker.

docs/diagnosis.md explains each code; tests/server/diagnosis/test_docs.py holds it to that.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Code(StrEnum):
    """The causes that are known by name."""

    WORKER_DOWN = "worker_down"
    NO_EVENT_ENDPOINT = "no_event_endpoint"
    EVENTS_OFF = "events_off"
    EVENTS_DISCONNECTED = "events_disconnected"
    TOPIC = "topic"
    NO_EVENTS = "no_events"
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
    INCORRECT_ROUTING = "incorrect_routing"


class Finding(msgspec.Struct, frozen=True):
    """What was expected of a worker, what was seen, and what to do about it."""

    worker: str
    code: Code
    expected: str
    seen: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: expected {self.expected}, seen {self.seen}; {self.fix}"
