"""Messages, live and replayed, to payloads in the order in which the engine published them.

In:  numbered payloads as they arrive, answers of the replay endpoint, and the time.
Out: calls of a Sink, replay orders for whoever owns the sockets, and a TrustState.

No sockets and no threads here. Stock publishers (vLLM, SGLang) number their messages from 0 in each
life of their process, keep the last ones, and replay them from a number that they are asked for.

    in order            applied
    seen before         dropped
    a gap               the engine is asked for what is missing; live messages wait for the end
    another life        what was known is cleared; asked for everything
    not in the buffer   what was known is cleared: removals may be among what is lost. What comes
                        then is true, but not all: STALE until the engine clears or restarts

Whether it is the same life is proved: a replay begins with the last message that was applied, and
other bytes under its number are another life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvplug.ingest import trust
from kvplug.ingest.applied_messages import AppliedMessages, Message, Numbered, Sink
from kvplug.ingest.held import HeldMessages
from kvplug.ingest.repair_settings import RepairSettings
from kvplug.ingest.replay_order import ReplayOrder
from kvplug.ingest.replay_schedule import ReplaySchedule
from kvplug.ingest.trust import TrustState

logger = logging.getLogger(__name__)


class Repair:
    """receive, replayed, replay_ended, tick; connected and disconnected.

    Set `can_replay` before the first message if the engine can be asked. Read: `state`, `order`
    (None: nothing is asked), and the counters.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        clock: Callable[[], float],
        settings: RepairSettings | None = None,
    ) -> None:
        self.order: ReplayOrder | None = None
        self.num_missed = self.num_duplicates = self.num_restarts = 0
        self.num_replays = self.num_recovered = self.num_failures = 0
        self.last_repair_s: float | None = None
        self.can_replay = False
        self._name, self._clock = name, clock
        self._settings = settings or RepairSettings()
        self._applied = AppliedMessages(sink)
        self._lost_at_s: float | None = None
        self._was_interrupted = False
        self._held = HeldMessages(self._settings.max_held_bytes)
        self._schedule = ReplaySchedule(clock, self._settings)
        self._may_start_over = True

    @property
    def last(self) -> int | None:
        """The number of the last message that was applied; None if there is none."""
        return self._applied.last

    @property
    def state(self) -> TrustState:
        """How much of the engine's blocks is known."""
        if self._lost_at_s is not None:
            return trust.DISCONNECTED if self.last is None else trust.INTERRUPTED
        if self.order is not None and not self.order.is_check:
            return trust.CATCHING_UP
        return self._applied.flaw

    def connected(self) -> None:
        """The stream is there (again)."""
        self._lost_at_s = None
        self._schedule.progressed()
        if self.last is None:
            self._applied.flaw = trust.SILENT
        if self.can_replay:
            self._ask()

    def disconnected(self) -> None:
        """The stream is gone; without replay, what was missed cannot be learnt."""
        self.order = None
        self._was_interrupted = True
        self._held.take()
        if self._lost_at_s is None:
            self._lost_at_s = self._clock()
        if not self.can_replay:
            self._applied.forget()

    def receive(self, messages: list[Message]) -> None:
        """Live messages, in the order of their arrival."""
        if self.order is not None and self.order.is_check and self._follows(messages):
            self.order = None  # the stream itself says that nothing is missing
        at = 0
        while at < len(messages):
            at += self._apply_run(messages, at)
            if at < len(messages):
                self._receive_odd(*messages[at])
                at += 1

    def replayed(self, messages: list[Numbered]) -> None:
        """Messages of the order that is open, as they arrive."""
        order = self.order
        run: list[Numbered] = []
        for number, payload in messages:
            if order is None or self.order is not order:
                return  # of an order that was given up
            order.deadline_s = self._clock() + self._settings.answer_timeout_s
            if not order.is_proved and not self._prove(order, number, payload):
                continue
            expected = self._applied.next_number + len(run)
            if number == expected:
                run.append((number, payload))
            elif number > expected:
                self._apply_replayed(run)
                self.replay_failed("the replay left messages out")
                return
        self._apply_replayed(run)

    def replay_ended(self) -> None:
        """The engine has sent all that it has."""
        order = self.order
        if order is None:
            return
        if not order.is_proved and not order.asks_everything:
            self._begin_new_life("its messages are gone")
            self._ask()
            return
        self.order = None
        if order.asks_everything and not order.is_proved:
            self._applied.start_over(-1)
        self._schedule.progressed()
        self._end_repair(order)
        self._receive_held(order.num_waiting)

    def _end_repair(self, order: ReplayOrder) -> None:
        self._was_interrupted = False
        if order.asks_everything and self._applied.flaw is trust.EXACT:
            self._may_start_over = True
        if order.is_check:
            self._schedule.checked()
        else:
            self._schedule.heard()
            self.last_repair_s = self._clock() - order.began_s

    def replay_failed(self, reason: str) -> None:
        """The endpoint cannot be asked, or its answer is of no use."""
        order = self.order
        if order is None:
            return
        self.num_failures += 1
        if order.is_check:
            self._leave_check()
        elif self._schedule.failed():
            self._ask(everything=order.asks_everything and not order.is_proved)
        else:
            self._give_up(reason)

    def tick(self) -> None:
        """Look at the time: replays that got no answer, pauses and lost streams that end."""
        now_s = self._clock()
        if self.order is not None and now_s > self.order.deadline_s:
            self.replay_failed("no answer")
        lost = self._lost_at_s is not None and now_s - self._lost_at_s > self._settings.lost_after_s
        if lost and self.last is not None:
            logger.warning("%s: its event stream is gone, its blocks are forgotten", self._name)
            self.order = None  # what it goes on from is forgotten, too
            self._held.take()
            self._applied.forget()
        if self.order is None and self._lost_at_s is None and self._may_ask():
            self._ask_on_time()

    def _ask_on_time(self) -> None:
        if self._applied.flaw is trust.MUTE:
            self._ask(everything=True)
        elif self.last is not None and self.last >= 0 and self._schedule.is_check_due:
            self._ask(is_check=True)

    # -- live messages --

    def _apply_run(self, messages: list[Message], first: int) -> int:
        """Apply the messages that follow in order; returns how many."""
        if self.order is not None:
            return 0
        run = self._applied.leading_in_order(messages[first:])
        if run:
            self._schedule.heard()
            self._apply(run)
        return len(run)

    def _follows(self, messages: list[Message]) -> bool:
        if self.last is None or len(self._held):
            return False
        return bool(self._applied.leading_in_order(messages[:1]))

    def _receive_odd(self, number: int | None, payload: bytes) -> None:
        """A message that does not simply follow the last one."""
        if number is None:
            if self._applied.apply_unnumbered(payload):
                self._start_over_once()
        elif self._applied.is_repeated(number, payload):
            self.num_duplicates += 1
        elif self.order is not None:
            self._held.add(number, payload)
        elif self.last is None:
            self._join_late(number, payload)
        elif number > self.last:
            self._bridge(number, payload)
        elif self._applied.is_late(number):
            self.num_duplicates += 1
        else:
            self._meet_new_life(number, payload)

    def _join_late(self, number: int, payload: bytes) -> None:
        if self._may_ask():
            self._held.add(number, payload)
            self._ask(everything=True)
        else:
            self._applied.flaw = trust.MUTE if self.can_replay else trust.LATE_JOIN
            self._apply([(number, payload)])

    def _bridge(self, number: int, payload: bytes) -> None:
        """A gap."""
        num_missing = number - self._applied.next_number
        self.num_missed += num_missing
        if self._may_ask():
            self._held.add(number, payload)
            self._ask()
            return
        flaw = trust.MUTE if self.can_replay else trust.missing(num_missing)
        self._applied.skip_to(number, flaw)
        self._apply([(number, payload)])

    def _meet_new_life(self, number: int, payload: bytes) -> None:
        if not self._may_ask():
            self._begin_new_life("its numbers began anew")
            self.receive([(number, payload)])
            return
        if self._applied.remembers(number):
            self._begin_new_life("its numbers began anew")
        self._held.add(number, payload)
        self._ask()  # tells whether it is one, if the number was too long ago to remember

    # -- replay --

    def _may_ask(self) -> bool:
        return self.can_replay and self._schedule.may_ask

    def _ask(self, *, everything: bool = False, is_check: bool = False) -> None:
        now_s = self._clock()
        everything = everything or self.last is None or self.last < 0
        began_s = self.order.began_s if self.order is not None else now_s
        self.num_replays += not is_check
        self.order = ReplayOrder(
            start=0 if everything or self.last is None else self.last,
            asks_everything=everything,
            began_s=began_s,
            deadline_s=now_s + self._settings.answer_timeout_s,
            is_check=is_check,
            num_waiting=len(self._held),
        )

    def _prove(self, order: ReplayOrder, number: int, payload: bytes) -> bool:
        """Look at the first message of an answer; returns whether it is to be applied."""
        if order.asks_everything:
            order.is_proved = True
            self._applied.start_over(number - 1)
            return True
        assert self.last is not None
        if number < self.last:
            return False
        if number == self.last and self._applied.is_repeated(number, payload):
            order.is_proved = True
            return False
        if number == self.last:
            self._begin_new_life("other messages have its numbers")
            self._ask()
            return False
        order.is_proved, order.is_check = True, False
        if number == self.last + 1 and not self._may_be_another_life():
            return True  # nothing is missing, but the message before it
        self._applied.skip_to(number, trust.truncated(number - self.last - 1))
        return True

    def _may_be_another_life(self) -> bool:
        """Whether the connection broke since the last message, or a number went down."""
        return self._was_interrupted or self._held.has_up_to(self.last)

    def _apply_replayed(self, run: list[Numbered]) -> None:
        if not run:
            return
        self.num_recovered += len(run)
        self._schedule.progressed()
        self._apply(run)

    def _give_up(self, reason: str) -> None:
        logger.warning("%s: replay failed again and again: %s", self._name, reason)
        self.order = None
        held = self._held.take()
        self._applied.clear(trust.MUTE)
        if held:
            self._applied.last = held[0][0] - 1
        self.receive([*held])

    def _leave_check(self) -> None:
        """Nothing is known to be missing, so nothing is given up; a gap is asked for at once."""
        self.order = None
        self._schedule.checked()
        self.receive([*self._held.take()])

    def _receive_held(self, num_waiting: int) -> None:
        """Go on with what came while the engine answered.

        What it did not send though it came before the engine was asked is of another life. And
        when numbers go down, messages overtook each other or a new life began: the engine knows.
        """
        self._held.drop(num_waiting)
        if self._held.is_rising():
            self.receive([*self._held.take()])
        else:
            self._ask()

    # -- effects --

    def _apply(self, run: list[Numbered]) -> None:
        if self._applied.apply(run):
            self._start_over_once()

    def _start_over_once(self) -> None:
        if self._may_start_over and self._may_ask():
            self._may_start_over = False  # if it does not help, it is not the wire
            if self.order is None:
                self._ask(everything=True)

    def _begin_new_life(self, reason: str) -> None:
        logger.warning(
            "%s: the engine restarted (%s), its blocks are forgotten", self._name, reason
        )
        self.num_restarts += 1
        self._may_start_over = True
        self._applied.forget()
