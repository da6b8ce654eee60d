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
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

from msgspec import structs

from kvplug import codec
from kvplug.errors import DecodeError, UnknownRankError
from kvplug.events import EventBatch, Rank
from kvplug.hidden_states import HiddenStates
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.ingest import trust
from kvplug.ingest.message_log import Effect
from kvplug.ingest.replay import ReplayRequest, ReplaySettings
from kvplug.ingest.sequencer import Sequencer
from kvplug.ingest.trust import Trust, TrustState
from kvplug.protocol import WorkerHello
from kvplug.records import Records, read_payloads
from kvplug.router.core import Router
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

# Messages in one run. Between runs other threads get the interpreter: a query that waits for it
# waits for some 30 us of Python.
_MAX_RUN_LENGTH = 32

OTHER_RANK: Final = "other_rank"
"""Why messages are refused that name another data-parallel rank than the publisher has."""

# Requests that had less than the engine's events say, until it is asked for them again.
_CERTAIN: Final = 4

# Of these the index takes nothing, so that it lacks what the events said.
_UNUSABLE = {
    RejectReason.NO_TOKENS.value,
    RejectReason.BIGRAM_TOKENS.value,
    RejectReason.BLOCK_SIZE.value,
    RejectReason.UNKNOWN_RANK.value,
    RejectReason.GROUP_BLOCK_SIZE.value,
    RejectReason.REFUSED_TIER.value,
    RejectReason.CHUNKED_OFFLOAD.value,
    OTHER_RANK,
}

_FIX = {
    RejectReason.BLOCK_SIZE.value: "start the router with the engine's --block-size",
    RejectReason.UNKNOWN_PARENT.value: "events were lost or began before the router; the engine's "
    "blocks become known again as it stores new prefixes, or at once when it restarts",
    RejectReason.CONFLICTING_HASH.value: "hashes of the engine and contents contradict each other",
    RejectReason.ADAPTER_RELOADED.value: "blocks that a LoRA adapter computed with other weights "
    "are forgotten; nothing is missing",
    RejectReason.BIGRAM_TOKENS.value: "speculative decoding with EAGLE keys blocks by pairs "
    "of tokens; route such engines by load",
    RejectReason.GROUP_BLOCK_SIZE.value: "the engine's KV cache groups have blocks of different "
    "sizes; start vLLM with --disable-hybrid-kv-cache-manager",
    RejectReason.CHUNKED_OFFLOAD.value: "blocks in host memory and on disk do not count; give the "
    "offloading connector the engine's block size",
    OTHER_RANK: "check that events= names the endpoint of the worker's own rank 0",
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

    Read: connected, trust, sequencer (`last` number and counters), and the counters
    `num_messages`, `num_stored`, `num_removed`, `skipped` by reason.
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
        self.about: WorkerHello | None = None
        self._router, self._evidence = router, evidence
        self._contradiction: TrustState | None = None
        self._has_started_over = False
        self._skips = SkipCounter(rank)
        self._applier = _Applier(router, rank, engine_rank, self._skips.add)
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
        if self.sequencer.last is not None:  # what came before was taken for something else
            self._applier.clear()
            self.sequencer.start_over()
        self._note_trust()

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
        self._look_for_contradictions()
        self.sequencer.tick()
        self._note_trust()
        if self.trust.level is Trust.STALE and self._evidence is not None:
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
        if state in (trust.EXACT, trust.UNCONFIRMED):
            hidden = trust.HIDDEN_STATES if self.hides_states else state
            state = self._contradiction or hidden
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
            confidence = default if self._evidence is None else self._evidence.confidence()
        self._set_confidence(confidence)

    def _set_confidence(self, confidence: float) -> None:
        for rank in self._applier.ranks:
            with suppress(UnknownRankError):  # its worker may have been removed just now
                self._router.set_confidence(rank, confidence)


class _Applier:
    """apply, clear; counts in num_stored and num_removed, and tells `skip` (reason, how many, more
    about it) what it cannot use.

    Runs of plain events go as arrays from bytes to the index (kvplug/records.py), everything else
    message by message through the codec.
    """

    def __init__(
        self,
        router: Router,
        rank: Rank,
        engine_rank: int | None,
        skip: Callable[[str, int, str], None],
    ) -> None:
        self.num_stored = self.num_removed = 0
        self._router, self._rank, self._skip = router, rank, skip
        self.engine_rank = engine_rank
        self.hidden: HiddenStates | None = None
        self.ranks = {rank}
        self._pooled_media: set[str] = set()
        self._run_length = 1

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply messages in order; never raises for what they hold."""
        effect, at = Effect(), 0
        while at < len(payloads):
            records = self._read_run(payloads, at)
            if records is None:
                self._apply_one(payloads[at], effect)
                at += 1
            else:
                self._apply_run(records, effect)
                at += records.num_payloads
        return effect

    def clear(self) -> None:
        """Forget the blocks of the publisher."""
        for rank in self.ranks:
            self._router.clear(rank)
        if self.hidden is not None:
            self.hidden.forget()

    def _read_run(self, payloads: list[bytes], first: int) -> Records | None:
        if self.hidden is not None:
            return None
        records = read_payloads(payloads[first : first + self._run_length])
        # Short at first: after one message that is not plain, the next ones seldom are.
        self._run_length = 1 if records is None else min(2 * self._run_length, _MAX_RUN_LENGTH)
        return records

    def _apply_run(self, records: Records, effect: Effect) -> None:
        if self._is_of_another(records.dp_rank):
            self._refuse(records.num_events, records.dp_rank, effect)
            return
        if self.engine_rank is not None:
            records = replace(records, dp_rank=None)
        rank = self._rank.named_by(records.dp_rank)
        applied = self._router.apply_records(rank, records)
        self._count(rank, applied, effect)

    def _apply_one(self, payload: bytes, effect: Effect) -> None:
        try:
            batch = codec.decode(payload)
        except DecodeError as error:
            self._skip("undecodable", 1, str(error))
            effect.defects["undecodable"] += 1
            return
        self._apply_batch(batch, effect)

    def _apply_batch(self, batch: EventBatch, effect: Effect) -> None:
        if self._is_of_another(batch.dp_rank):
            self._refuse(len(batch.events), batch.dp_rank, effect)
            return
        if self.engine_rank is not None:
            batch = structs.replace(batch, dp_rank=None)
        if self.hidden is not None:
            batch = self.hidden.with_ends(batch)
        rank = self._rank.named_by(batch.dp_rank)
        applied = self._router.apply(rank, batch)
        self._count(rank, applied, effect)
        for reason, count in batch.skipped.items():
            self._skip(reason, count, "")
            effect.defects[reason] += count
        for medium in batch.unknown_media:
            self._skip("unknown_medium", 1, f"{medium[:40]!r} is taken for a disk")
        for medium in set(batch.pooled_media) - self._pooled_media:
            self._pooled_media.add(medium)
            logger.info("%s: blocks in %s count as in host memory", self._rank, medium)

    def _is_of_another(self, dp_rank: int | None) -> bool:
        return self.engine_rank is not None and dp_rank not in (None, self.engine_rank)

    def _refuse(self, num_events: int, dp_rank: int | None, effect: Effect) -> None:
        self._skip(OTHER_RANK, num_events, f"expected {self.engine_rank}, got {dp_rank};")
        effect.defects[OTHER_RANK] += num_events

    def _count(self, rank: Rank, applied: ApplyResult, effect: Effect) -> None:
        if not applied.rejected[RejectReason.UNKNOWN_RANK.value]:  # a rank that somebody made up
            self.ranks.add(rank)
        self.num_stored += applied.num_stored
        self.num_removed += applied.num_removed
        for reason, count in applied.rejected.items():
            self._skip(reason, count, "")
        if applied.was_cleared:
            effect.cleared = True
            effect.defects.clear()
        if applied.num_orphans:
            effect.defects[RejectReason.UNKNOWN_PARENT.value] += applied.num_orphans
        for reason in _UNUSABLE & applied.rejected.keys():
            effect.defects[reason] += applied.rejected[reason]


def _sentence(state: TrustState) -> str:
    if state.reason is None:
        return "every block that it holds is known"
    return f"{state.level}: {state.reason}; {state.fix}"
