"""Messages, live and replayed, to payloads in the order in which the engine published them.

In:  messages as they arrive, answers to replay requests, and the time.
Out: calls of a Sink, replay requests for whoever owns the sockets, and a TrustState.

No sockets and no threads here. Stock publishers (vLLM, SGLang) number their messages from 0 in each
incarnation of their process, keep the last ones, and send them again from a number on.

    in order            applied
    seen before         dropped
    a gap               the engine is asked for what is missing; live messages wait for the end
    a new incarnation   the engine is asked for everything, which replaces what was known
    not in the buffer   what was known is cleared: removals may be among what is lost. What comes
                        then is true, but not all: STALE until the engine clears or restarts

Whether it is the same incarnation is proved: a replay begins with the last message that was
applied, and other bytes under its number are another incarnation's.

A replay endpoint may be silent: then a gap clears what was known, as if there were none, and a
check after each pause finds out whether it answers again. Or it is another engine's: a message that
came live before a request must be in the answer, and an endpoint that contradicts the stream twice
is used for such checks alone. What is known from a replay is EXACT once an answer had a live one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Final

from kvplug.ingest import trust
from kvplug.ingest.message_log import PendingMessages, RecentDigests, Sink
from kvplug.ingest.replay import ReplayRequest, ReplaySchedule, ReplaySettings
from kvplug.ingest.trust import TrustState
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

# Once may be a restart that nobody saw, between the message and the answer.
_MAX_CONTRADICTIONS: Final = 2


class Sequencer:
    """connected, disconnected; receive; replayed, replay_ended, replay_failed; tick.

    Set `can_replay` before the first message if the engine can be asked. Read: `state`, `request`
    (None: nothing is asked), `last` (the number of the last message that was applied; -1 if number
    0 is the next, None if nothing is known), and the counters.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        clock: Callable[[], float],
        settings: ReplaySettings | None = None,
    ) -> None:
        self.last: int | None = None
        self.request: ReplayRequest | None = None
        self.can_replay = False
        self.num_missed = self.num_duplicates = self.num_restarts = 0
        self.num_replays = self.num_recovered = self.num_failures = 0
        self.last_repair_s: float | None = None
        self._name, self._sink, self._clock = name, sink, clock
        self._settings = settings or ReplaySettings()
        self._schedule = ReplaySchedule(clock, self._settings)
        self._pending = PendingMessages(self._settings.max_pending_bytes)
        self._recent = RecentDigests()
        self._known: TrustState = trust.NEVER_CONNECTED  # of the blocks, when nothing is asked
        self._replay_fault: TrustState | None = None
        self._num_contradictions = 0
        self._is_confirmed = self._may_start_over = True
        self._was_confirmed = False  # since the stream was connected
        self._was_interrupted = False
        self._lost_at_s: float | None = None
        self._given_up = range(0)

    @property
    def state(self) -> TrustState:
        """How much of the engine's blocks is known."""
        if self._lost_at_s is not None:
            return trust.DISCONNECTED if self.last is None else trust.INTERRUPTED
        if self.request is not None and not self.request.is_check:
            return trust.CATCHING_UP
        if self._known is trust.EXACT and not self._is_confirmed:
            return trust.UNCONFIRMED
        return self._known

    def connected(self) -> None:
        """The stream is there (again)."""
        self._lost_at_s = None
        self._schedule.connected()
        self._num_contradictions, self._was_confirmed = 0, False
        if self._replay_fault is trust.REPLAY_SILENT:
            self._replay_fault = None
        if self.last is None:
            self._known = trust.SILENT
        if self._may_ask():
            self._ask()

    def disconnected(self) -> None:
        """The stream is gone; without replay, what was missed cannot be learnt."""
        self.request = None
        self._was_interrupted = True
        self._pending.take()
        if self._lost_at_s is None:
            self._lost_at_s = self._clock()
        if not self.can_replay or self._replay_fault is trust.REPLAY_CONTRADICTS:
            self._forget()

    def tick(self) -> None:
        """Look at the time: answers that do not come, pauses and lost streams that end."""
        now_s, request = self._clock(), self.request
        if request is not None and now_s > min(request.deadline_s, request.expires_s):
            self.replay_failed("no answer")
        lost = self._lost_at_s is not None and now_s - self._lost_at_s > self._settings.lost_after_s
        if lost and self.last is not None:
            logger.warning("%s: its event stream is gone, its blocks are forgotten", self._name)
            self.request = None  # what it goes on from is forgotten, too
            self._pending.take()
            self._forget()
        if self.request is None and self._lost_at_s is None:
            self._check_on_time()

    def start_over(self) -> None:
        """Ask for everything again if that is possible: what is known seems to be wrong."""
        if self._may_ask() and not self._is_waiting:
            self._ask(everything=True)

    # -- live messages --

    def receive(self, messages: list[Message]) -> None:
        """Live messages, in the order of their arrival."""
        at = 0
        while at < len(messages):
            run = self._leading_in_order(messages, at)
            if run:
                self._apply_live(run)
                at += len(run)
            if at < len(messages):
                self._receive_odd(messages[at])
                at += 1

    @property
    def _next(self) -> int:
        return 0 if self.last is None else self.last + 1

    @property
    def _is_waiting(self) -> bool:  # whether live messages wait for an answer
        return self.request is not None and not self.request.is_check

    def _leading_in_order(self, messages: list[Message], first: int) -> list[Message]:
        if self._is_waiting:
            return []
        end, expected = first, self._next
        for message in islice(messages, first, None):
            if message.sequence != expected:
                break
            end, expected = end + 1, expected + 1
        return messages[first:end]

    def _apply_live(self, run: list[Message]) -> None:
        if self.last is None and run[0].sequence == 0:
            self._known = trust.EXACT  # the first that it published: nothing is missing
        self._schedule.heard()
        self._apply(run, is_live=True)
        if not self._is_confirmed and self.request is None and self._may_ask():
            self._ask(is_check=True)

    def _receive_odd(self, message: Message) -> None:
        """A message that does not simply follow the last one."""
        if message.sequence is None:
            self._known = trust.UNNUMBERED
            if self._pass_on([message]):
                self._start_over_once()
        elif self._is_repeated(message):
            self._note_repetition(message.sequence)
        elif self._is_waiting:
            self._pending.add(message)
        elif self.last is None:
            self._join_late(message)
        elif message.sequence > self.last:
            self._bridge(message, message.sequence - self._next)
        elif message.sequence in self._given_up and message.sequence != 0:
            # Later ones overtook it. A 0 is more likely another incarnation.
            self.num_duplicates += 1
        else:
            self._meet_new_incarnation(message, message.sequence)

    def _note_repetition(self, sequence: int) -> None:
        self.num_duplicates += 1
        if not self._recent.was_live(sequence):
            self._confirm()  # a replay brought it, and now the stream does

    def _is_repeated(self, message: Message) -> bool:
        assert message.sequence is not None
        is_past = self.last is not None and message.sequence <= self.last
        return is_past and self._recent.is_same(message)

    def _join_late(self, message: Message) -> None:
        if self._may_ask():
            self._pending.add(message)
            self._ask()
        else:
            self._known = self._replay_fault or trust.LATE_JOIN
            self._apply([message], is_live=True)

    def _bridge(self, message: Message, num_missing: int) -> None:
        """A gap."""
        self.num_missed += num_missing
        if self._may_ask():
            self._pending.add(message)
            self._ask()
            return
        self._skip_to(message, self._replay_fault or trust.missing(num_missing))
        self._apply([message], is_live=True)

    def _meet_new_incarnation(self, message: Message, sequence: int) -> None:
        if not self._may_ask():
            self._note_restart("its numbers began anew")
            self._forget()
            self.receive([message])
            return
        if self._recent.knows(sequence):
            self._note_restart("its numbers began anew")
            self._forget()
        self._pending.add(message)
        self._ask()  # tells whether it is one, if the number was too long ago to be remembered

    # -- replay --

    def replayed(self, messages: list[Message]) -> None:
        """Messages of the answer to `request`, as they arrive."""
        request = self.request
        run: list[Message] = []
        for message in messages:
            if request is None or self.request is not request:
                return  # of a request that was given up
            if message.sequence is None or message.sequence < request.first:
                continue
            if not request.is_proved and not self._prove(request, message, message.sequence):
                continue
            expected = self._next + len(run)
            if message.sequence == expected:
                run.append(message)
            elif message.sequence > expected:
                self._apply_replayed(request, run)
                self.replay_failed("the replay left messages out")
                return
        self._apply_replayed(request, run)

    def replay_ended(self) -> None:
        """The engine has sent all that it has."""
        request = self.request
        if request is None:
            return
        self._note_answer()
        if not request.is_proved and not request.asks_everything:
            self._doubt(request, "its messages are gone")
        elif self._is_contradicted(request):
            self._distrust(request)
        else:
            self._finish(request)

    def replay_failed(self, reason: str) -> None:
        """The endpoint cannot be asked, or its answer is of no use."""
        request = self.request
        if request is None:
            return
        self.num_failures += 1
        if request.is_check:
            self._end_check()
        elif self._schedule.failed():
            self._ask(everything=request.asks_everything and not request.is_proved)
        else:
            logger.warning("%s: replay failed again and again: %s", self._name, reason)
            self._go_on_without(trust.REPLAY_SILENT)

    def _may_ask(self) -> bool:
        return self.can_replay and self._replay_fault is None and self._schedule.may_ask

    def _check_on_time(self) -> None:
        """Ask without a known need: for a lost tail, and whether a bad endpoint has become good."""
        if not self.can_replay or not self._schedule.may_ask:
            return
        fault = self._replay_fault
        if fault is None and self._known in (trust.REPLAY_SILENT, trust.REPLAY_CONTRADICTS):
            self._ask(everything=True)  # it has become good, and has what was missed
        elif self._was_live_last() if fault is not None else self._is_check_due():
            self._ask(is_check=True)
        elif fault is trust.REPLAY_SILENT:
            self._ask(is_check=True, everything=True)

    def _is_check_due(self) -> bool:
        return self.last is not None and self.last >= 0 and self._schedule.is_check_due

    def _ask(self, *, everything: bool = False, is_check: bool = False) -> None:
        now_s, former = self._clock(), self.request
        everything = everything or self.last is None or self.last < 0
        self.num_replays += not is_check
        first = 0 if everything else self._next - 1
        self.request = ReplayRequest(
            payload=first.to_bytes(8, "big"),
            first=first,
            asks_everything=everything,
            began_s=now_s if former is None else former.began_s,
            deadline_s=now_s + self._settings.answer_timeout_s,
            expires_s=now_s + self._settings.max_answer_s,
            is_check=is_check,
            num_pending=len(self._pending),
        )

    def _prove(self, request: ReplayRequest, message: Message, sequence: int) -> bool:
        """Look at the first message of an answer; returns whether it is to be applied."""
        self._note_answer()
        if request.asks_everything:
            self._replace_with(request, sequence)
            return True
        if self._recent.knows(sequence):
            if self._recent.is_same(message):
                self._accept(request, sequence)
            else:
                self._doubt(request, "other messages have its numbers")
            return False
        if sequence < self._next:
            return False  # too long ago to be remembered
        self._accept(request, sequence)
        if sequence == self._next and not self._may_be_new_incarnation():
            return True  # nothing is missing, but the message before it
        request.is_check = False
        self._skip_to(message, trust.truncated(sequence - self._next))
        return True

    def _note_answer(self) -> None:
        self._schedule.progressed()
        if self._replay_fault is trust.REPLAY_SILENT:
            self._replay_fault = None

    def _replace_with(self, request: ReplayRequest, first: int) -> None:
        """What is known gives way to the answer to a request for everything."""
        request.is_proved, request.is_check = True, False
        self._forget()
        self.last, self._is_confirmed = first - 1, self._was_confirmed
        self._known = trust.EXACT if first == 0 else trust.truncated(first)

    def _accept(self, request: ReplayRequest, sequence: int) -> None:
        request.is_proved = True
        if self._recent.was_live(sequence):
            request.is_confirmed = True
            self._confirm()

    def _confirm(self) -> None:
        """A message that came live is in an answer: the endpoint is this engine's."""
        self._is_confirmed = self._was_confirmed = True
        self._num_contradictions = 0

    def _may_be_new_incarnation(self) -> bool:
        """Whether the connection broke since the last message, or a number went down."""
        return self._was_interrupted or self._pending.has_up_to(self.last)

    def _apply_replayed(self, request: ReplayRequest | None, run: list[Message]) -> None:
        if request is not None and self.request is request and run:
            request.deadline_s = self._clock() + self._settings.answer_timeout_s
            self.num_recovered += len(run)
            self._schedule.progressed()
            self._apply(run, is_live=False)

    def _doubt(self, request: ReplayRequest, reason: str) -> None:
        """The answer lacks the last message: a new incarnation's, or not of this engine."""
        if self._replay_fault is not None:
            self._end_check()
            return
        if not self._may_be_new_incarnation() and self._was_live_last():
            # An endpoint that never had a live message was another engine's all along.
            self._num_contradictions += 1 if self._was_confirmed else _MAX_CONTRADICTIONS
        if self._num_contradictions >= _MAX_CONTRADICTIONS:
            self._go_on_without(trust.REPLAY_CONTRADICTS)
            return
        self._note_restart(reason)
        self._ask(everything=True)

    def _was_live_last(self) -> bool:
        """Whether the last message came live, on the connection that there is."""
        if self.last is None or self.last < 0 or self._was_interrupted:
            return False
        return self._recent.was_live(self.last)

    def _is_contradicted(self, request: ReplayRequest) -> bool:
        """Whether a message that came live before the request is not what the answer has."""
        if not request.is_proved:  # it is empty
            return request.num_pending > 0 or self._was_live_last()
        for message in self._pending.first(request.num_pending):
            if message.sequence is None or message.sequence >= self._next:
                return True
            if self._recent.is_same(message):
                self._confirm()
            elif self._recent.knows(message.sequence):
                return True
        return False

    def _distrust(self, request: ReplayRequest) -> None:
        self._num_contradictions += 1
        if self._num_contradictions >= _MAX_CONTRADICTIONS or not request.is_proved:
            self._go_on_without(trust.REPLAY_CONTRADICTS)
        else:
            self._finish(request)

    def _finish(self, request: ReplayRequest) -> None:
        """The answer is complete, and applied."""
        self.request, self._was_interrupted = None, False
        if not request.is_proved:  # it never published anything
            self._forget()
            self.last, self._known, self._is_confirmed = -1, trust.EXACT, True
        self._may_start_over |= request.asks_everything and self._known is trust.EXACT
        if request.is_confirmed:
            self._replay_fault = None
        if request.is_check:
            self._end_check()
            self._check_on_time()
            return
        self._schedule.heard()
        self.last_repair_s = self._clock() - request.began_s
        self._receive_pending(request.num_pending)

    def _end_check(self) -> None:
        self.request = None
        self._schedule.checked()
        if self._replay_fault is not None:
            self._schedule.paused()

    def _receive_pending(self, num_answered: int) -> None:
        """Live messages that came while the engine answered. When numbers go down among them,
        messages overtook each other or a new incarnation began: the engine knows.
        """
        self._pending.drop(num_answered)
        if self._pending.is_rising():
            self.receive(self._pending.take())
        else:
            self._ask()

    def _go_on_without(self, fault: TrustState) -> None:
        """The endpoint is of no use: what was known from it goes, live messages count."""
        if self._replay_fault is not fault:
            logger.warning("%s: %s; %s", self._name, fault.reason, fault.fix)
        request, self.request, pending = self.request, None, self._pending.take()
        is_intact = not pending and self._was_live_last() and self._is_confirmed
        self._replay_fault, self._is_confirmed = fault, True
        self._schedule.paused()
        if is_intact and request is not None and not request.is_proved:
            self._known = fault  # nothing of the answer was applied
            return
        self._forget()
        self._known = fault
        if pending and pending[0].sequence is not None:
            self.last = pending[0].sequence - 1
        self.receive(pending)

    # -- what is known --

    def _apply(self, run: list[Message], *, is_live: bool) -> None:
        self._recent.remember(run, is_live=is_live)
        is_repairable = self._pass_on(run)
        self.last = run[-1].sequence  # now, as who reads it takes them for applied
        if is_repairable:
            self._start_over_once()

    def _pass_on(self, run: list[Message]) -> bool:
        """Apply them; returns whether a replay may repair what is wrong with them."""
        effect = self._sink.apply([message.payload for message in run])
        if effect.cleared:
            self._known = trust.EXACT
        for reason in effect.defects:
            self._known = trust.unusable(reason)
        return effect.is_repairable

    def _start_over_once(self) -> None:
        if self._may_start_over and self._may_ask():
            self._may_start_over = False  # if it does not help, it is not the wire
            self.start_over()

    def _skip_to(self, message: Message, known: TrustState) -> None:
        """This message follows; those between are given up, and with them what was known."""
        assert message.sequence is not None
        self._given_up = range(self._next, message.sequence)
        self._sink.clear()
        self.last, self._known = message.sequence - 1, known

    def _forget(self) -> None:
        """Neither blocks nor messages are known any more."""
        self._sink.clear()
        self._recent.forget()
        self.last, self._known, self._given_up = None, trust.SILENT, range(0)
        self._was_interrupted = False

    def _note_restart(self, reason: str) -> None:
        logger.warning("%s: the engine restarted (%s)", self._name, reason)
        self.num_restarts += 1
        self._may_start_over = True
