"""One publisher's messages to one worker's blocks in a Router.

In:  messages of an event stream, stock or ours, and answers to requests.
Out: an index kept up to date, counters, and how much of it can be trusted.

Nothing that arrives raises: what cannot be used is counted by reason and named once in the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Final, Protocol

from kvplug import codec
from kvplug.errors import DecodeError, UnknownRankError
from kvplug.events import Rank
from kvplug.hidden_states import HiddenStates
from kvplug.ingest import trust
from kvplug.ingest.applying import Applier, SkipCounter
from kvplug.ingest.life_sequencer import LifeSequencer
from kvplug.ingest.position import FollowerPosition
from kvplug.ingest.replay import ReplaySettings, Request
from kvplug.ingest.sequencer import Sequencer
from kvplug.ingest.trust import Trust, TrustState
from kvplug.protocol import WorkerHello, is_ours
from kvplug.router.core import Router
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

# Requests that had less than the engine's events say, until it is asked for them again.
_CERTAIN: Final = 4

_COUNTERS: Final = (
    "num_missed",
    "num_duplicates",
    "num_restarts",
    "num_replays",
    "num_recovered",
    "num_failures",
)


class Evidence(Protocol):
    """What the answers of a rank's engine tell of its events, asked every second or so."""

    def confidence(self) -> float:
        """What residency is worth while the rank is STALE, 0 to 1."""

    def contradicted(self) -> tuple[int, int] | None:
        """If the engine reuses again and again less than its events say it has: in how many of the
        last requests, and how many there were.
        """


class Follower:
    """The event thread feeds it with `receive`, and says when the stream is connected or lost.

    Whoever owns the sockets asks the engine for what `replay_request` says, and hands the answer to
    `replayed` and `replay_ended`.

    The first message says whether the publisher is a stock one or ours (kvplug/protocol.py). When
    that changes, the engine was started anew, and what was known is forgotten.

    Read: connected, trust, sequencer (`last` number and counters), `about` (what a publisher of
    ours says of its engine), and the counters `num_messages`, `num_stored`, `num_removed`,
    `skipped` by reason.
    """

    def __init__(
        self,
        router: Router,
        rank: Rank,
        *,
        engine_rank: int | None = None,
        evidence: Evidence | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: ReplaySettings | None = None,
    ) -> None:
        """`engine_rank`: the data-parallel rank that the publisher's messages must name, if any; by
        default each message is of the worker's rank that it names. `evidence`: by default there is
        none, and while the rank is STALE its blocks are worth the router's `stale_confidence`.
        ConfigError if the router uses no events.
        """
        router.require_events(rank)
        self.rank = rank
        self.connected = False
        self.num_messages = 0
        self._router, self._evidence = router, evidence
        self._contradiction: TrustState | None = None
        self._has_started_over = False
        self._joined_as = router.joined_as(rank)
        self._skips = SkipCounter(rank)
        self._applier = Applier(router, rank, engine_rank, self._skips.add)
        self._clock, self._settings = clock, settings
        self._can_ask_publisher = False
        self._is_wire_known = True
        self._is_over_nats = False
        self.sequencer: Sequencer | LifeSequencer = self._sequencer_of(is_ours=False)
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
    def can_ask_publisher(self) -> bool:
        """Whether an endpoint that the publisher names can be asked; whoever owns the sockets says
        so.
        """
        return self._can_ask_publisher

    @can_ask_publisher.setter
    def can_ask_publisher(self, can_ask: bool) -> None:
        self._can_ask_publisher = can_ask
        if isinstance(self.sequencer, LifeSequencer):
            self.sequencer.can_ask_publisher = can_ask

    @property
    def about(self) -> WorkerHello | None:
        """What the publisher said last of its engine; None if it says nothing, as stock ones."""
        return self.sequencer.about if isinstance(self.sequencer, LifeSequencer) else None

    @property
    def speaks_ours(self) -> bool:
        """Whether messages of our own wire came last, also if they cannot be read."""
        return isinstance(self.sequencer, LifeSequencer)

    @property
    def engine_rank(self) -> int | None:
        """The data-parallel rank that messages must name; None: whatever they name."""
        return self._applier.engine_rank

    @engine_rank.setter
    def engine_rank(self, engine_rank: int | None) -> None:
        self._applier.engine_rank = engine_rank

    @property
    def hides_states(self) -> bool:
        """Whether the model has windows or states of which the events say nothing, as with SGLang;
        whoever knows the engine says so.
        """
        return self._applier.hidden is not None

    @hides_states.setter
    def hides_states(self, hides_states: bool) -> None:
        if hides_states == self.hides_states:
            return
        self._applier.hidden = HiddenStates() if hides_states else None
        if isinstance(self.sequencer, LifeSequencer):
            return  # its publisher says so itself
        if self.sequencer.last is not None:  # what came before was taken for something else
            self._applier.clear()
            self.sequencer.start_over()
        self._note_trust()

    @property
    def replay_request(self) -> Request | None:
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

    def on_interrupted(self) -> None:
        """The publisher cannot be heard or asked; what it publishes is kept and comes later."""
        if isinstance(self.sequencer, LifeSequencer):
            self.sequencer.interrupted()
            self._note_trust()
        else:  # a stock publisher says nothing that would show whether all of it came
            self.on_disconnected()

    def on_resumed(self) -> None:
        """It can, again."""
        self._is_over_nats = True
        if isinstance(self.sequencer, LifeSequencer):
            self.connected = True
            self.sequencer.resumed()
            self._note_trust()
        elif self.sequencer.last is not None:
            self.on_connected()
        elif not self.connected:
            self.connected, self._is_wire_known = True, False

    def position(self) -> FollowerPosition | None:
        """How far it has come, to go with a snapshot of the index; call it between two messages.
        None if its blocks cannot be kept: of a stock publisher, or as nothing is known yet, or as
        its worker has lost them by joining the fleet again.
        """
        has_blocks = self._router.joined_as(self.rank) == self._joined_as
        if not has_blocks or not isinstance(self.sequencer, LifeSequencer):
            return None
        return self.sequencer.position()

    def resume(self, position: FollowerPosition) -> None:
        """Go on from there, before the first message: the index has the blocks of that moment.

        The rank is STALE until its publisher gives a sign of life.
        """
        sequencer = self._sequencer_of(is_ours=True)
        sequencer.can_replay = self.sequencer.can_replay
        assert isinstance(sequencer, LifeSequencer)
        self.sequencer = sequencer
        sequencer.resume(position)
        self._note_trust()

    def start_anew(self) -> None:
        """Forget all blocks of the rank, and have its publisher say what it holds."""
        self._start_anew(are_ours=self.speaks_ours)
        self._note_trust()

    def receive(self, messages: list[Message]) -> None:
        """Apply messages in the order of their arrival."""
        was_blind = self.trust.level is Trust.BLIND
        if was_blind:  # blocks count once they are applied: nobody expects them from then on
            self._set_confidence(1.0)
        self.num_messages += len(messages)
        num_duplicates = self.sequencer.num_duplicates
        self._receive(self._well_formed(messages))
        if self.sequencer.num_duplicates > num_duplicates:
            self._skips.add("duplicate", self.sequencer.num_duplicates - num_duplicates)
        self._note_trust()
        if was_blind:
            self._tell_router()

    def _receive(self, messages: list[Message]) -> None:
        """To the sequencer of their wire. All messages of a part seldom are not of one."""
        if not messages:
            return
        speaks_ours = isinstance(self.sequencer, LifeSequencer)
        if not self._is_wire_known:
            self._learn_wire(messages[0])
        if all(is_ours(each.payload) is speaks_ours for each in (messages[0], messages[-1])):
            self.sequencer.receive(messages)
            return
        for are_ours, run in groupby(messages, key=lambda each: is_ours(each.payload)):
            part = list(run)
            if are_ours is not isinstance(self.sequencer, LifeSequencer):
                self._change_wire(part, are_ours=are_ours)
            self.sequencer.receive(part)

    def _learn_wire(self, message: Message) -> None:
        """Only a stock publisher is asked for everything as soon as it is there."""
        self._is_wire_known = True
        if isinstance(self.sequencer, Sequencer) and not is_ours(message.payload):
            self.sequencer.connected()

    def _change_wire(self, messages: list[Message], *, are_ours: bool) -> None:
        if not (are_ours or any(map(_is_stock, messages))):
            return  # no change, but damage
        name = "kvplug's own" if are_ours else "a stock"
        logger.info("%s: its publisher speaks %s wire", self.rank, name)
        self._start_anew(are_ours=are_ours)

    def _start_anew(self, *, are_ours: bool) -> None:
        """Nothing is known any more."""
        former, self.sequencer = self.sequencer, self._sequencer_of(is_ours=are_ours)
        for counter in _COUNTERS:
            setattr(self.sequencer, counter, getattr(former, counter))
        self.sequencer.can_replay = former.can_replay
        self._applier.clear()
        if self.connected:
            self.sequencer.connected()

    def _sequencer_of(self, *, is_ours: bool) -> Sequencer | LifeSequencer:
        name, applier = str(self.rank), self._applier
        if not is_ours:
            return Sequencer(name, applier, clock=self._clock, settings=self._settings)
        sequencer = LifeSequencer(
            name, applier, self._skips.add, clock=self._clock, settings=self._settings
        )
        sequencer.can_ask_publisher = self._can_ask_publisher
        return sequencer

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
        self._look_whether_it_rejoined()
        self._look_for_contradictions()
        self.sequencer.tick()
        self._note_trust()
        if self.trust.level is Trust.STALE and self._evidence is not None:
            self._tell_router()

    def _look_whether_it_rejoined(self) -> None:
        """A worker that has left the fleet and is back has nothing in the index."""
        joined_as = self._router.joined_as(self.rank)
        if joined_as not in (0, self._joined_as):
            self._joined_as = joined_as
            self._start_anew(are_ours=self.speaks_ours)
            self._tell_router()

    def _look_for_contradictions(self) -> None:
        """When it is certain, all events are asked for once: what was lost, or is another engine's,
        is put right then. Not before, as the engine may have forgotten its first ones.
        """
        counts = None if self._evidence is None else self._evidence.contradicted()
        if counts is None:
            self._contradiction, self._has_started_over = None, False
            return
        self._contradiction = self._contradiction or trust.contradicted(*counts)
        if counts[0] >= _CERTAIN and not self._has_started_over:
            self._has_started_over = True
            self.sequencer.start_over()

    def _well_formed(self, messages: list[Message]) -> list[Message]:
        reasons = [each.malformed for each in messages if each.malformed is not None]
        for reason in reasons:
            self._skips.add("undecodable", 1, reason)
        if not reasons:
            return messages
        return [each for each in messages if each.malformed is None]

    def _note_trust(self) -> None:
        state = self.sequencer.state
        if state in (trust.EXACT, trust.UNCONFIRMED, trust.HIDDEN_STATES):
            is_hidden = self.hides_states and isinstance(self.sequencer, Sequencer)
            hidden = trust.HIDDEN_STATES if is_hidden else state
            is_stock = self._is_over_nats and isinstance(self.sequencer, Sequencer)
            admitted = trust.STOCK_OVER_NATS if is_stock and hidden is trust.EXACT else hidden
            state = self._contradiction or admitted
        if state is self.trust or state == self.trust:
            return
        was, self.trust = self.trust, state
        log = logger.warning if was.level is Trust.EXACT else logger.info
        log("%s: %s", self.rank, _sentence(state))
        self._tell_router()

    def _tell_router(self) -> None:
        confidence = {Trust.EXACT: 1.0, Trust.BLIND: 0.0}.get(self.trust.level)
        if self.trust in (trust.UNCONFIRMED, trust.STOCK_OVER_NATS):
            confidence = 1.0  # most replays are the engine's own, and it is most likely all
        if confidence is None:
            default = self._router.config.stale_confidence
            confidence = default if self._evidence is None else self._evidence.confidence()
        self._set_confidence(confidence)

    def _set_confidence(self, confidence: float) -> None:
        for rank in self._applier.ranks:
            with suppress(UnknownRankError):  # its worker may have been removed just now
                self._router.set_confidence(rank, confidence)


def _is_stock(message: Message) -> bool:
    try:
        codec.decode(message.payload)
    except DecodeError:
        return False
    return True


def _sentence(state: TrustState) -> str:
    if state.reason is None:
        return "every block that it holds is known"
    return f"{state.level}: {state.reason}; {state.fix}"
