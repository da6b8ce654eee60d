"""One publisher's messages to one worker's blocks in a Router.

In:  messages of a stock event stream, and of its replays.
Out: an index kept up to date, counters, and how much of it can be trusted.

Nothing that arrives raises: what cannot be used is counted by reason and named once in the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from kvplug.events import Rank
from kvplug.index.apply_result import RejectReason
from kvplug.ingest import trust
from kvplug.ingest.applier import Applier
from kvplug.ingest.replay import ReplayRequest, ReplaySettings
from kvplug.ingest.sequencer import Sequencer
from kvplug.ingest.trust import Trust, TrustState
from kvplug.router.core import Router
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

_FIX = {
    RejectReason.BLOCK_SIZE.value: "start the router with the engine's --block-size",
    RejectReason.UNKNOWN_PARENT.value: "events were lost or began before the router; the engine's "
    "blocks become known again as it stores new prefixes, or at once when it restarts",
    RejectReason.CONFLICTING_HASH.value: "the engine gives one id to two contents",
    RejectReason.BIGRAM_TOKENS.value: "speculative decoding with EAGLE keys blocks by pairs "
    "of tokens; route such engines by load",
    "undecodable": "check that the endpoint is an event publisher and no other service",
}


class SkipCounter:
    """What of a stream could not be used. add; read `by_reason`."""

    def __init__(self, rank: Rank) -> None:
        self.by_reason: Counter[str] = Counter()
        self._rank = rank

    def add(self, reason: str, count: int = 1, detail: str = "") -> None:
        """Count, and log the first of each reason with its fix."""
        if not self.by_reason[reason]:
            fix = _FIX.get(reason, "")
            logger.warning("%s: events skipped: %s %s %s", self._rank, reason, detail, fix)
        self.by_reason[reason] += count


class Follower:
    """The event thread feeds it with `receive`, and says when the stream is connected or lost.

    Whoever owns the sockets asks the engine for what `replay_request` says, and hands the answer to
    `replayed` and `replay_ended`.

    Read: connected, trust, sequencer (`last` number and counters), and the counters
    `num_messages`, `num_stored`, `num_removed`, `skipped` by reason.
    """

    def __init__(
        self,
        router: Router,
        rank: Rank,
        *,
        stale_confidence: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: ReplaySettings | None = None,
    ) -> None:
        """`stale_confidence`: what residency is worth while the rank is STALE, by default the
        router's `stale_confidence`. ConfigError if the router uses no events.
        """
        router.require_events(rank)
        self.rank = rank
        self.connected = False
        self.num_messages = 0
        self._router, self._stale_confidence = router, stale_confidence
        self._skips = SkipCounter(rank)
        self._applier = Applier(router, rank, self._skips.add)
        self.sequencer = Sequencer(str(rank), self._applier, clock=clock, settings=settings)
        self.trust = self.sequencer.state
        self._tell_router()

    @property
    def can_replay(self) -> bool:
        """Whether the engine can be asked for messages again; whoever owns the sockets says so."""
        return self.sequencer.can_replay

    @can_replay.setter
    def can_replay(self, can_replay: bool) -> None:
        self.sequencer.can_replay = can_replay

    @property
    def replay_request(self) -> ReplayRequest | None:
        """What the engine is to be asked for; another object is another request."""
        return self.sequencer.request

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
        self.sequencer.connected()
        self._note_trust()

    def on_disconnected(self) -> None:
        """The publisher is gone, or is a new one that knows nothing of the old one's numbers."""
        if self.connected:
            logger.warning("%s: event stream lost", self.rank)
        self.connected = False
        self.sequencer.disconnected()
        self._note_trust()

    def receive(self, messages: list[Message]) -> None:
        """Apply messages in the order of their arrival."""
        was_blind = self.trust.level is Trust.BLIND
        if was_blind:  # blocks count once they are applied: nobody expects them from then on
            self._set_confidence(1.0)
        self.num_messages += len(messages)
        num_duplicates = self.sequencer.num_duplicates
        self.sequencer.receive(self._well_formed(messages))
        if self.sequencer.num_duplicates > num_duplicates:
            self._skips.add("duplicate", self.sequencer.num_duplicates - num_duplicates)
        self._note_trust()
        if was_blind:
            self._tell_router()

    def replayed(self, messages: list[Message]) -> None:
        """Take a part of the answer to `replay_request`."""
        self.sequencer.replayed(messages)
        self._note_trust()

    def replay_ended(self) -> None:
        """The answer is complete."""
        self.sequencer.replay_ended()
        self._note_trust()

    def replay_failed(self, reason: str) -> None:
        """There will be no answer."""
        self.sequencer.replay_failed(reason)
        self._note_trust()

    def tick(self) -> None:
        """Time has passed; call it every second or so."""
        self.sequencer.tick()
        self._note_trust()
        if self.trust.level is Trust.STALE and self._stale_confidence is not None:
            self._tell_router()

    def _well_formed(self, messages: list[Message]) -> list[Message]:
        malformed = [each for each in messages if each.malformed is not None]
        for each in malformed:
            self._skips.add("undecodable", 1, each.malformed or "")
        if not malformed:
            return messages
        return [each for each in messages if each.malformed is None]

    def _note_trust(self) -> None:
        state = self.sequencer.state
        if state is self.trust or state == self.trust:
            return
        was, self.trust = self.trust, state
        log = logger.warning if was.level is Trust.EXACT else logger.info
        log("%s: %s", self.rank, _sentence(state))
        self._tell_router()

    def _tell_router(self) -> None:
        confidence = {Trust.EXACT: 1.0, Trust.BLIND: 0.0}.get(self.trust.level)
        if self.trust is trust.UNCONFIRMED:
            confidence = 1.0  # it is all that a replay had, and most replays are the engine's own
        if confidence is None:
            default = self._router.config.stale_confidence
            confidence = self._stale_confidence() if self._stale_confidence is not None else default
        self._set_confidence(confidence)

    def _set_confidence(self, confidence: float) -> None:
        for rank in self._applier.ranks:
            self._router.set_confidence(rank, confidence)


def _sentence(state: TrustState) -> str:
    if state.reason is None:
        return "every block that it holds is known"
    return f"{state.level}: {state.reason}; {state.fix}"
