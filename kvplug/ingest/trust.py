"""How much of what an engine holds is known, and why not more.

In:  what happened to its event stream.   Out: a TrustState, for scores, health and metrics.

    EXACT   every event was seen: the index has the engine's blocks, no more and no less
    STALE   something is missing or being repaired; what is known earns a part of its credit
    BLIND   no usable events: nothing is known

    APPROXIMATE  events are not used: what was routed there lately is taken to be there
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Trust(StrEnum):
    """The level, as it is called in health and metrics."""

    EXACT = "exact"
    STALE = "stale"
    BLIND = "blind"
    APPROXIMATE = "approximate"
    UNUSED = "unused"


class TrustState(Struct, frozen=True):
    """A level with its reason and what an operator can do; both None if it is EXACT."""

    level: Trust
    reason: str | None = None
    fix: str | None = None


EXACT = TrustState(Trust.EXACT)
APPROXIMATE = TrustState(
    Trust.APPROXIMATE,
    "events are not used: what was routed to it lately counts as cached",
    "none needed; start the router without --no-kv-events to go by what the engine says",
)
UNUSED = TrustState(
    Trust.UNUSED,
    "prefixes do not count with a weight of 0, so no events are followed",
    "none needed; give --kv-overlap-score-weight a weight above 0 to go by prefixes",
)
NEVER_CONNECTED = TrustState(
    Trust.BLIND,
    "its event stream was never connected",
    "check that the engine runs, was started with --kv-events-config, and that events= names its "
    "endpoint; if it requires keys, give --events-key-file",
)
SILENT = TrustState(
    Trust.BLIND,
    "no event has arrived yet",
    "none needed if the engine has stored nothing; otherwise check the topic and that the engine "
    "was started with enable_kv_cache_events",
)
DISCONNECTED = TrustState(
    Trust.BLIND, "its event stream is disconnected", "none, it is connected again by itself"
)
INTERRUPTED = TrustState(
    Trust.STALE,
    "its event stream is interrupted",
    "none, what is missed meanwhile is asked for when it is back",
)
CATCHING_UP = TrustState(
    Trust.STALE, "missed events are being replayed", "none, it is exact when the replay ends"
)
_NO_REPLAY = (
    "start the engine with a replay_endpoint in --kv-events-config and name it with replay=; "
    "until then it is exact again when its cache is reset or it restarts"
)
LATE_JOIN = TrustState(Trust.STALE, "the router joined after the engine's first events", _NO_REPLAY)
UNNUMBERED = TrustState(
    Trust.STALE,
    "its messages have no numbers, so lost ones go unnoticed",
    "use a publisher of vLLM 0.11 or SGLang 0.5 or newer",
)
REPLAY_SILENT = TrustState(
    Trust.STALE,
    "events are missing and the replay endpoint does not answer",
    "check replay=; the engine is asked again after a pause",
)
REPLAY_CONTRADICTS = TrustState(
    Trust.STALE,
    "the replay endpoint does not have the messages that the engine publishes",
    "check that replay= is this engine's endpoint and that buffer_steps in --kv-events-config is "
    "above 0; until then what is lost stays lost",
)
UNCONFIRMED = TrustState(
    Trust.STALE,
    "its blocks are known from a replay, and no live event has shown yet that it is this engine's",
    "none needed, the next event shows it",
)

STOCK_OVER_NATS = TrustState(
    Trust.STALE,
    "its publisher speaks the stock wire over NATS, where nothing shows whether its last events "
    "came",
    "have it speak kvplug's own wire (unset KVPLUG_WIRE); what is known counts in full",
)
NO_HEARTBEAT = TrustState(
    Trust.STALE,
    "its publisher gives no sign of life, which it does every 2 s",
    "look at the engine, which hangs or is overloaded; what is known of its blocks stays",
)
NO_ASKS = TrustState(
    Trust.STALE,
    "events are missing and its publisher names no endpoint that can be asked",
    "name one with replay=; until then it is exact again when its cache is reset",
)
ASKS_SILENT = TrustState(
    Trust.STALE,
    "events are missing and its publisher does not answer",
    "check that the router reaches the endpoint for asks (docs/events.md, kvplug's own stream); "
    "it is asked again after a pause",
)
BAD_ANSWERS = TrustState(
    Trust.STALE,
    "events are missing and what its publisher answers is of no use",
    "see the skipped events for the reason, and check that replay= is this engine's endpoint; it "
    "is asked again after a pause",
)
HIDDEN_STATES = TrustState(
    Trust.STALE,
    "its model has windows or states, and its events do not say which of them it keeps",
    "none needed; what is certain counts (docs/events.md, Windows and states in SGLang)",
)


def missing(num_messages: int) -> TrustState:
    """A gap that nobody was asked about."""
    return TrustState(Trust.STALE, f"{num_messages} event messages were lost", _NO_REPLAY)


def truncated(num_messages: int) -> TrustState:
    """A gap that the engine no longer has; 0: all but the proof that it is the same engine."""
    gone = f"{num_messages} event messages are gone from the engine's replay buffer"
    unproved = "the engine's replay buffer no longer shows whether it is the same engine"
    return TrustState(
        Trust.STALE,
        gone if num_messages else unproved,
        "raise buffer_steps in --kv-events-config; it is exact again when the engine's cache is "
        "reset or it restarts",
    )


def contradicted(num_wrong: int, num_requests: int) -> TrustState:
    """The engine reuses less than it says it has; of the last requests that counted on that."""
    return TrustState(
        Trust.STALE,
        f"{num_wrong} of the last {num_requests} requests had fewer cached tokens than its events "
        "say",
        "docs/troubleshooting.md, contradicted; until then it is routed to by load",
    )


_NO_HYBRID = (
    "start vLLM with --disable-hybrid-kv-cache-manager if the model allows it, else route by load "
    "(docs/events.md, Hybrid models)"
)


_NO_FORWARDER_REPLAY = (
    "start the engine with a replay_endpoint and give the forwarder replay=; until then it is "
    "exact again when its cache is reset or it restarts"
)
_UNUSABLE = "events could not be used: "

_FIX = {
    "group_block_size": _NO_HYBRID,
    "unsupported_version": "install the same release of kvplug in the engine and the router",
    "hash_scheme": "install the same release of kvplug in the engine and the router",
    "queue_full": "none, it is exact again when the engine's cache is reset",
    "sender_lost": "none, it is exact again when the engine's cache is reset",
    "recorder_failed": "none, it is exact again when the engine's cache is reset; please report it",
    # Of kvplug/forwarder/doubts.py.
    "zmq_disconnected": "start the engine, and check the forwarder's events= of it",
    "zmq_interrupted": "none, what is missed meanwhile is asked for when the engine is back",
    "zmq_silent": "none needed if the engine has stored nothing; otherwise check the forwarder's "
    "topic= of it",
    "zmq_replaying": "none, it is exact when the forwarder has what it missed",
    "zmq_unconfirmed": "none needed, the next event shows it",
    "zmq_unnumbered": "use a publisher of vLLM 0.11 or SGLang 0.5 or newer",
    "zmq_late_join": _NO_FORWARDER_REPLAY,
    "zmq_lost": _NO_FORWARDER_REPLAY,
    "zmq_replay_silent": "check the forwarder's replay= of it; it is asked again after a pause",
    "zmq_replay_contradicts": "check that the forwarder's replay= is this engine's endpoint",
}


def unusable(reason: str) -> TrustState:
    """Events came in order, but were of no use."""
    is_of_groups = reason.startswith("attention:")
    return TrustState(
        Trust.STALE,
        f"{_UNUSABLE}{reason}",
        _NO_HYBRID if is_of_groups else _FIX.get(reason, "docs/events.md says what it means"),
    )


def is_unusable(state: TrustState) -> bool:
    """Whether it is one of those."""
    return (state.reason or "").startswith(_UNUSABLE)
