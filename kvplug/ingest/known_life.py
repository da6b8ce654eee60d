"""What is known of one of our publishers: which life, how far, and how much of it.

In:  fields that a LifeSequencer sets.   Out: a TrustState, a FollowerPosition.
"""

from __future__ import annotations

from collections.abc import Callable

from kvplug.ingest import trust
from kvplug.ingest.introduction import defect_of
from kvplug.ingest.lives import Lives
from kvplug.ingest.message_log import LifeSink, WaitingEvents
from kvplug.ingest.position import FollowerPosition
from kvplug.ingest.trust import TrustState
from kvplug.protocol import WorkerHello


class KnownLife:
    """Read: state, life, next, last, about (what the last hello said), position()."""

    def __init__(self, sink: LifeSink, clock: Callable[[], float], max_pending_bytes: int) -> None:
        self.about: WorkerHello | None = None
        self.next = 0
        self._sink, self._clock = sink, clock
        self._lives = Lives(clock)
        self._pending = WaitingEvents(max_pending_bytes)
        self._hello_next = 0
        # A hello of this life was heard; all before `next` is known; live events wait.
        self._is_introduced = self._is_complete = self._is_waiting = False
        self._refusal: str | None = None  # of all events, for what the hello says
        self._unreadable: str | None = None  # what came last
        self._defect: str | None = None
        self._fault: TrustState | None = None  # why nothing is waited for, though it is missing
        self._lost_at_s: float | None = None
        self._is_interrupted = False

    @property
    def life(self) -> int | None:
        """The life that is followed; None if no message has come yet."""
        return self._lives.present

    @property
    def state(self) -> TrustState:
        """How much of the engine's blocks is known."""
        if self._lost_at_s is not None:
            return trust.DISCONNECTED if self.life is None else trust.INTERRUPTED
        if self.life is None or self._refusal is not None:
            reason = self._refusal or self._unreadable
            return trust.SILENT if reason is None else trust.unusable(reason)
        if self._is_interrupted:
            return trust.INTERRUPTED
        if self._lives.is_overdue:
            return trust.NO_HEARTBEAT
        if self._is_waiting:
            return trust.CATCHING_UP
        return self._fault or self._of_known_blocks()

    def _of_known_blocks(self) -> TrustState:
        assert self.about is not None
        reason = self._unreadable or self._defect or defect_of(self.about)
        if reason is not None:
            return trust.unusable(reason)
        return trust.HIDDEN_STATES if self.about.hides_states else trust.EXACT

    @property
    def last(self) -> int | None:
        """The number of the last events that were applied; None if nothing is known."""
        return None if self.life is None or self._is_waiting else self.next - 1

    def position(self) -> FollowerPosition | None:
        """How far it has come, between two messages; None if there is nothing to be kept."""
        if self.life is None or self._refusal is not None or not self._is_introduced:
            return None
        return FollowerPosition(
            life=self.life,
            next=self.next,
            known_next=max(self.next, self._hello_next, self._pending.behind_last),
            is_complete=self._is_complete,
            past_lives=tuple(self._lives.past),
            about=self.about,
            defect=self._defect,
        )

    def _drop_blocks(self) -> None:
        self._sink.clear()
        self._is_complete, self._defect = False, None
