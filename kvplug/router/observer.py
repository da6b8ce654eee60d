"""Observing a Router: what it reports of its decisions and of the events that it applies.

In:  decisions, runs of events.   Out: calls of a RouterObserver, in the order of what happened.

All calls come under the router's lock: the index, the load and the fleet are as the call says, and
stay so until it returns. A request may be waiting meanwhile, so what is done in a call should be
done in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvplug.events import AllBlocksCleared, BlockRemoved, CxlStateTransition, Event, Rank
from kvplug.index.packed_run import PackedRun
from kvplug.kernels import wire
from kvplug.packed import CLEARED, REMOVED, TRANSITION
from kvplug.records import Records
from kvplug.router.decider import Decision
from kvplug.router.load import ActiveRequest

_TAKE_AWAY = (REMOVED, CLEARED, TRANSITION)


class Arrival(NamedTuple):
    """A batch or a run of events: of which rank, and when.

    ts: when its engine sent it, in seconds on the engine's clock, 0 if it does not say;
    arrived_s: when it came, in seconds on the router's.
    """

    rank: Rank
    ts: float
    arrived_s: float


class RouterObserver:
    """What a Router reports; as it is it wants nothing, and is the one that a Router begins with.

    It must call no method of the router that takes the lock. Only members of the fleet are
    reported, not events that are refused as an unknown rank's.
    """

    def on_decision(self, decision: Decision, request: ActiveRequest) -> None:
        """A request was routed; `request` has its hashes, and when."""

    def on_moved(self, request_id: str) -> None:
        """A request in flight is on another rank than the decision said. If it has migrated, the
        decision for the new rank comes next.
        """

    def watches(self, rank: Rank) -> bool:
        """Whether removals are to be told from stores now, by `before_removal` and
        `after_removal`. Asked before each slice of events.
        """
        return False

    def before_removal(self, rank: Rank) -> None:
        """Next the rank loses blocks, by events that only take away, or by a clear."""

    def after_removal(self, arrival: Arrival) -> None:
        """The rank has lost blocks. Requests may have been routed since `before_removal`."""

    def on_applied(self, arrival: Arrival) -> None:
        """All events of a batch or run were applied."""

    def on_clear(self, rank: Rank) -> None:
        """`Router.clear` was called and is done: a new incarnation of the engine may begin."""

    def on_rank_left(self, rank: Rank) -> None:
        """The rank leaves the fleet, with its requests; nothing of it is reported any more."""


def run_of_events(events: Sequence[Event], first: int) -> tuple[bool, int]:
    """Whether the events from `first` on take blocks away, and up to which one they do alike."""
    takes_away, end = _takes_away(events[first]), first + 1
    while end < len(events) and _takes_away(events[end]) == takes_away:
        end += 1
    return takes_away, end


def run_of_records(records: Records, first: int) -> tuple[bool, int]:
    """As `run_of_events`, for records."""
    kinds = records.records[wire.KIND :: wire.RECORD_WIDTH][first : records.num_events]
    takes_away = kinds != wire.STORED
    others = np.flatnonzero(takes_away != takes_away[0])
    return bool(takes_away[0]), first + int(others[0] if len(others) else len(kinds))


def run_of_packed(run: PackedRun, first: int) -> tuple[bool, int]:
    """As `run_of_events`, for packed events."""
    kinds = run.kinds
    takes_away, end = kinds[first] in _TAKE_AWAY, first + 1
    while end < len(kinds) and (kinds[end] in _TAKE_AWAY) == takes_away:
        end += 1
    return takes_away, end


def _takes_away(event: Event) -> bool:
    return isinstance(event, BlockRemoved | AllBlocksCleared | CxlStateTransition)
