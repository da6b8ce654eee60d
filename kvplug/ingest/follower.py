"""One publisher's messages to one worker's blocks in a Router.

In:  multipart messages of a stock event stream, and of its replays.
Out: an index kept up to date, counters, and how much of it can be trusted.

Nothing that arrives raises: what cannot be used is counted by reason and named once in the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import Rank
from kvplug.ingest.applied_messages import Message
from kvplug.ingest.applier import Applier
from kvplug.ingest.repair import Repair
from kvplug.ingest.repair_settings import RepairSettings
from kvplug.ingest.replay_order import ReplayOrder
from kvplug.ingest.skips import Skips
from kvplug.ingest.trust import Trust, TrustState
from kvplug.router.core import Router

logger = logging.getLogger(__name__)

_NUM_SEQUENCE_BYTES = 8


class Follower:
    """Feed it with `receive`; tell it about `connected` and `disconnected`, and the time by `tick`.

    Whoever owns the sockets asks the engine for what `replay_order` says and hands the answer to
    `replayed` and `replay_ended`.

    Read: connected, trust, repair (`last` number and counters), and the counters `num_messages`,
    `num_stored`, `num_removed`, `skipped` by reason.
    """

    def __init__(
        self,
        router: Router,
        rank: Rank,
        *,
        stale_worth: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: RepairSettings | None = None,
    ) -> None:
        """`stale_worth`: what residency is worth while the rank is STALE, by default the router's
        `stale_worth`. ConfigError if the router uses no events.
        """
        router.require_events(rank)
        self.rank = rank
        self.connected = False
        self.num_messages = 0
        self._router, self._stale_worth = router, stale_worth
        self._skips = Skips(rank)
        self._applier = Applier(router, rank, self._skips)
        self.repair = Repair(str(rank), self._applier, clock=clock, settings=settings)
        self.trust = self.repair.state
        self._tell_router()

    @property
    def can_replay(self) -> bool:
        """Whether the engine can be asked for messages again; whoever owns the sockets says so."""
        return self.repair.can_replay

    @can_replay.setter
    def can_replay(self, can_replay: bool) -> None:
        self.repair.can_replay = can_replay

    @property
    def replay_order(self) -> ReplayOrder | None:
        """What the engine is to be asked for; another object is another request."""
        return self.repair.order

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
        self.repair.connected()
        self._note_trust()

    def on_disconnected(self) -> None:
        """The publisher is gone, or is a new one that knows nothing of the old one's numbers."""
        if self.connected:
            logger.warning("%s: event stream lost", self.rank)
        self.connected = False
        self.repair.disconnected()
        self._note_trust()

    def receive(self, frames: list[bytes]) -> None:
        """Apply one message."""
        self.receive_many([frames])

    def receive_many(self, messages: list[list[bytes]]) -> None:
        """Apply messages in the order of their arrival."""
        was_blind = self.trust.level is Trust.BLIND
        if was_blind:  # blocks count once they are applied: nobody expects them from then on
            self._set_worth(1.0)
        self.num_messages += len(messages)
        numbered: list[Message] = []
        for frames in messages:
            if len(frames) == 3 and len(frames[1]) == _NUM_SEQUENCE_BYTES:
                numbered.append((int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self._parse(frames, numbered)
        num_duplicates = self.repair.num_duplicates
        self.repair.receive(numbered)
        if self.repair.num_duplicates > num_duplicates:
            self._skips.add("duplicate", self.repair.num_duplicates - num_duplicates)
        self._note_trust()
        if was_blind:
            self._tell_router()

    def replayed(self, messages: list[tuple[int, bytes]]) -> None:
        """Take a part of the answer to `replay_order`."""
        self.repair.replayed(messages)
        self._note_trust()

    def replay_ended(self) -> None:
        """The answer is complete."""
        self.repair.replay_ended()
        self._note_trust()

    def replay_failed(self, reason: str) -> None:
        """There will be no answer."""
        self.repair.replay_failed(reason)
        self._note_trust()

    def tick(self) -> None:
        """Time has passed; call it every second or so."""
        self.repair.tick()
        self._note_trust()
        if self.trust.level is Trust.STALE and self._stale_worth is not None:
            self._tell_router()

    def _parse(self, frames: list[bytes], numbered: list[Message]) -> None:
        try:
            frame = codec.parse_frames(frames)
        except DecodeError as error:
            self._skips.add("undecodable", 1, str(error))
        else:
            numbered.append((frame.seq, frame.payload))

    def _note_trust(self) -> None:
        state = self.repair.state
        if state is self.trust or state == self.trust:
            return
        was, self.trust = self.trust, state
        log = logger.warning if was.level is Trust.EXACT else logger.info
        log("%s: %s", self.rank, _sentence(state))
        self._tell_router()

    def _tell_router(self) -> None:
        worth = {Trust.EXACT: 1.0, Trust.BLIND: 0.0}.get(self.trust.level)
        if worth is None:
            default = self._router.config.stale_worth
            worth = self._stale_worth() if self._stale_worth is not None else default
        self._set_worth(worth)

    def _set_worth(self, worth: float) -> None:
        for rank in self._applier.ranks:
            self._router.set_worth(rank, worth)


def _sentence(state: TrustState) -> str:
    if state.reason is None:
        return "every block that it holds is known"
    return f"{state.level}: {state.reason}; {state.cure}"
