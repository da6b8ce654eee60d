"""One publisher's messages to one worker's blocks in a Router.

In:  multipart messages of a stock event stream.   Out: an index kept up to date, and counters.

Nothing that arrives raises: what cannot be used is counted by reason and named once in the log.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import Rank
from kvplug.index.applied import Refusal
from kvplug.ingest.applier import Applier, Effect
from kvplug.ingest.sequence import Arrival, SequenceTracker
from kvplug.ingest.skips import Skips
from kvplug.router.core import Router

logger = logging.getLogger(__name__)


class Follower:
    """Feed it with `receive`; tell it about `connected` and `disconnected`.

    Read: connected, incomplete (why the index may not hold all of the worker's blocks, or None),
    sequence, and the counters `num_messages`, `num_stored`, `num_removed`, `skipped` by reason.
    """

    def __init__(self, router: Router, rank: Rank) -> None:
        self.rank = rank
        self.connected = False
        self.incomplete: str | None = None
        self.sequence = SequenceTracker()
        self.num_messages = 0
        self._skips = Skips(rank)
        self._applier = Applier(router, rank, self._skips)

    @property
    def num_stored(self) -> int:
        """Blocks that the engine stored."""
        return self._applier.num_stored

    @property
    def num_removed(self) -> int:
        """Blocks that the engine removed."""
        return self._applier.num_removed

    @property
    def skipped(self) -> Counter[str]:
        """By reason, how much of the stream could not be used."""
        return self._skips.by_reason

    def on_connected(self) -> None:
        """The publisher is there (again)."""
        self.connected = True
        logger.info("%s: event stream connected", self.rank)

    def on_disconnected(self) -> None:
        """The publisher is gone: nothing that it said is known to hold any more."""
        if self.connected:
            logger.warning("%s: event stream lost, its blocks are forgotten", self.rank)
        self.connected = False
        self._start_over()

    def receive(self, frames: list[bytes]) -> None:
        """Apply one message."""
        self.num_messages += 1
        try:
            frame = codec.parse_frames(frames)
        except DecodeError as error:
            self._skips.add("undecodable", 1, str(error))
            return
        arrival = self.sequence.observe(frame.seq)
        if arrival is Arrival.DUPLICATE:
            self._skips.add("duplicate")
            return
        self._note(arrival)
        self._judge(self._applier.apply([frame.payload]))

    def _note(self, arrival: Arrival) -> None:
        if arrival is Arrival.RESTART:
            logger.warning("%s: engine restarted, its blocks are forgotten", self.rank)
            self._start_over()
        elif arrival is Arrival.GAP:
            self._mark_incomplete(f"{self.sequence.num_missed} event messages were lost")
        elif arrival is Arrival.LATE_JOIN:
            self._mark_incomplete("the router joined after the engine's first events")

    def _judge(self, effect: Effect) -> None:
        if effect.cleared:
            self.incomplete = None  # whatever was missed is gone from the engine, too
        for reason in effect.defects:
            if reason == Refusal.UNKNOWN_PARENT:
                self._mark_incomplete("blocks came whose parents are unknown")
            else:
                self._mark_incomplete(f"events could not be used: {reason}")

    def _start_over(self) -> None:
        last = self.sequence.last
        self.sequence.reset()
        self.incomplete = None
        self._applier.clear()
        logger.debug("%s: starting over after sequence number %s", self.rank, last)

    def _mark_incomplete(self, reason: str) -> None:
        if self.incomplete is None:
            logger.warning("%s: not all of its blocks are known: %s", self.rank, reason)
        self.incomplete = reason
