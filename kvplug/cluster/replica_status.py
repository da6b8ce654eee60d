"""ReplicaStatus: how a router replica is, for health, metrics and findings; how far it lags.

In:  what the replica knows.   Out: plain values.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from kvplug.cluster.parts import Part
from kvplug.cluster.presence import ReplicaSaid
from kvplug.cluster.streams import StreamState

# One entry a second: what is behind for longer lags by as much at least.
_MAX_SEEN: Final = 600


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """is_ready: it knows what the stream had when it started, at least; applied_seq: up to where
    it has applied the stream; lag_messages, lag_s: how far and how long it is behind its end;
    generation, snapshot_seq, snapshot_bytes: of the last snapshot, None without one; num_snapshots:
    made by this replica; num_consumers: durable consumers that it has made, one after another;
    num_rewound: times that the stream was new or had lost its end; num_late_beats: beats that
    waited 1 s for events that they count; restored_bytes, ready_after_s: of its start;
    problems: by part, a sentence; refused: what the server does not allow this router;
    differences: of the stream from what this router would make; replicas: the others; is_double:
    another one has its id.
    """

    router_id: str
    is_connected: bool = False
    is_ready: bool = False
    applied_seq: int = 0
    lag_messages: int = 0
    lag_s: float = 0.0
    stream: StreamState | None = None
    generation: int = 0
    snapshot_seq: int | None = None
    snapshot_bytes: int | None = None
    num_snapshots: int = 0
    num_reconnects: int = 0
    num_consumers: int = 0
    num_rewound: int = 0
    num_late_beats: int = 0
    restored_bytes: int = 0
    ready_after_s: float | None = None
    problems: dict[Part, str] = {}
    refused: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    replicas: dict[str, ReplicaSaid] = {}
    is_double: bool = False


class Lag:
    """note what the stream's last number is; lag_s at a number. No clock of another machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_MAX_SEEN)

    def note(self, last_seq: int) -> None:
        """The stream ends there now."""
        if self._seen and last_seq < self._seen[-1][1]:  # it was made anew
            self._seen.clear()
        self._seen.append((self._clock(), last_seq))

    def lag_s(self, applied_seq: int) -> float:
        """For how long there has been something that is not applied; 0 if there is nothing."""
        late = [at_s for at_s, last_seq in self._seen if last_seq > applied_seq]
        return self._clock() - late[0] if late else 0.0
