"""What is not known of a stock publisher's engine, as its readers are told: reasons in the hello.

In:  a TrustState of the ZMQ side.   Out: `defects` of kvplug/protocol.py, none if it is EXACT.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from kvplug.ingest import trust
from kvplug.ingest.trust import TrustState

LOST: Final = "zmq_lost"
"""Messages were lost on the way from the engine to the forwarder, and cannot be had again."""

_REASONS: Final = MappingProxyType(
    {
        trust.NEVER_CONNECTED: "zmq_disconnected",
        trust.DISCONNECTED: "zmq_disconnected",
        trust.INTERRUPTED: "zmq_interrupted",
        trust.SILENT: "zmq_silent",
        trust.CATCHING_UP: "zmq_replaying",
        trust.UNCONFIRMED: "zmq_unconfirmed",
        trust.LATE_JOIN: "zmq_late_join",
        trust.UNNUMBERED: "zmq_unnumbered",
        trust.REPLAY_SILENT: "zmq_replay_silent",
        trust.REPLAY_CONTRADICTS: "zmq_replay_contradicts",
    }
)
FORGOTTEN: Final = MappingProxyType({_REASONS[trust.CATCHING_UP]: 1})
"""What was known is not any more, and why is not said yet."""


def doubts_of(state: TrustState) -> dict[str, int]:
    """By reason, 1 for each; what events showed to be missing is in the life itself."""
    if state in (trust.EXACT, trust.HIDDEN_STATES) or trust.is_unusable(state):
        return {}
    return {_REASONS.get(state, LOST): 1}
