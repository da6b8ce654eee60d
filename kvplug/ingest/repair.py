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
from typing import Protocol

from kvplug.ingest import trust
from kvplug.ingest.applier import Effect
from kvplug.ingest.held import HeldMessages, is_rising
from kvplug.ingest.recent import RecentMessages
from kvplug.ingest.repair_settings import RepairSettings
from kvplug.ingest.replay_order import ReplayOrder
from kvplug.ingest.replay_schedule import ReplaySchedule
from kvplug.ingest.trust import TrustState

logger = logging.getLogger(__name__)

Message = tuple[int | None, bytes]

# A replay may cure these: what came before them was lost or damaged on the way.
_CURABLE = frozenset(("unknown_parent", "undecodable"))


class Sink(Protocol):
    """Where payloads go (ingest/applier.py)."""

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply them in order."""

    def clear(self) -> None:
        """Forget all that the publisher said."""


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
        self.last: int | None = None
        self.order: ReplayOrder | None = None
        self.num_missed = self.num_duplicates = self.num_restarts = 0
        self.num_replays = self.num_recovered = self.num_failures = 0
        self.last_repair_s: float | None = None
        self.can_replay = False
        self._name, self._sink, self._clock = name, sink, clock
        self._settings = settings or RepairSettings()
        self._recent = RecentMessages()
        self._flaw: TrustState = trust.NEVER_CONNECTED
        self._lost_at_s: float | None = None
        self._was_interrupted = False
        self._held = HeldMessages(self._settings.max_held_bytes)
        self._schedule = ReplaySchedule(clock, self._settings)
        self._late: range = range(0)
        self._may_start_over = True

    @property
    def state(self) -> TrustState:
        """How much of the engine's blocks is known."""
        if self._lost_at_s is not None:
            return trust.DISCONNECTED if self.last is None else trust.INTERRUPTED
        if self.order is not None and not self.order.is_check:
            return trust.CATCHING_UP
        return self._flaw

    def connected(self) -> None:
        """The stream is there (again)."""
        self._lost_at_s = None
        self._schedule.progressed()
        if self.last is None:
            self._flaw = trust.SILENT
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
            self._forget()

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

    def replayed(self, messages: list[tuple[int, bytes]]) -> None:
        """Messages of the order that is open, as they arrive."""
        order = self.order
        run: list[tuple[int, bytes]] = []
        for number, payload in messages:
            if order is None or self.order is not order:
                return  # of an order that was given up
            order.deadline_s = self._clock() + self._settings.answer_timeout_s
            if not order.is_proved and not self._prove(order, number, payload):
                continue
            expected = 0 if self.last is None else self.last + 1
            if number == expected + len(run):
                run.append((number, payload))
            elif number > expected + len(run):
                self._apply_replayed(run)
                self._fail("the replay left messages out")
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
            self._start_over(-1)
        self._schedule.progressed()
        self._end_repair(order)
        self._receive_held(order.num_waiting)

    def _end_repair(self, order: ReplayOrder) -> None:
        self._was_interrupted = False
        if order.asks_everything and self._flaw is trust.EXACT:
            self._may_start_over = True
        if order.is_check:
            self._schedule.checked()
        else:
            self._schedule.heard()
            self.last_repair_s = self._clock() - order.began_s

    def replay_failed(self, reason: str) -> None:
        """The endpoint cannot be asked."""
        if self.order is not None:
            self._fail(reason)

    def tick(self) -> None:
        """Look at the time: replays that got no answer, pauses and lost streams that end."""
        now_s = self._clock()
        if self.order is not None and now_s > self.order.deadline_s:
            self._fail("no answer")
        lost = self._lost_at_s is not None and now_s - self._lost_at_s > self._settings.lost_after_s
        if lost and self.last is not None:
            logger.warning("%s: its event stream is gone, its blocks are forgotten", self._name)
            self._forget()
        if self.order is None and self._lost_at_s is None and self._may_ask():
            self._ask_on_time()

    def _ask_on_time(self) -> None:
        if self._flaw is trust.MUTE:
            self._ask(everything=True)
        elif self.last is not None and self.last >= 0 and self._schedule.is_check_due:
            self._ask(is_check=True)

    # -- live messages --

    def _apply_run(self, messages: list[Message], first: int) -> int:
        """Apply the messages that follow in order; returns how many."""
        if self.order is not None:
            return 0
        expected = self.last + 1 if self.last is not None else 0
        payloads: list[bytes] = []
        for number, payload in messages[first:]:
            if number != expected:
                break
            self._recent.remember(expected, payload)
            payloads.append(payload)
            expected += 1
        if payloads:
            if self.last is None:
                self._flaw = trust.EXACT
            self.last = expected - 1
            self._schedule.heard()
            self._apply(payloads)
        return len(payloads)

    def _follows(self, messages: list[Message]) -> bool:
        if not messages or len(self._held) or self.last is None:
            return False
        return messages[0][0] == self.last + 1

    def _receive_odd(self, number: int | None, payload: bytes) -> None:
        """A message that does not simply follow the last one."""
        if number is None:
            self._flaw = trust.UNNUMBERED
            self._apply([payload])
        elif self._is_repeated(number, payload):
            self.num_duplicates += 1
        elif self.order is not None:
            self._held.add(number, payload)
        elif self.last is None:
            self._join_late(number, payload)
        elif number > self.last:
            self._bridge(number, payload)
        elif number in self._late and number:
            self.num_duplicates += 1  # overtaken by later ones, and given up already
        else:
            self._meet_new_life(number, payload)

    def _is_repeated(self, number: int, payload: bytes) -> bool:
        if self.last is None or number > self.last:
            return False
        return self._recent.is_same(number, payload)

    def _join_late(self, number: int, payload: bytes) -> None:
        if self._may_ask():
            self._held.add(number, payload)
            self._ask(everything=True)
        else:
            self._flaw = trust.MUTE if self.can_replay else trust.LATE_JOIN
            self._go_on_from(number, payload)

    def _bridge(self, number: int, payload: bytes) -> None:
        """A gap."""
        assert self.last is not None
        num_missing = number - self.last - 1
        self.num_missed += num_missing
        if self._may_ask():
            self._held.add(number, payload)
            self._ask()
            return
        self._late = range(self.last + 1, number)
        self._clear(trust.MUTE if self.can_replay else trust.missing(num_missing))
        self._go_on_from(number, payload)

    def _meet_new_life(self, number: int, payload: bytes) -> None:
        if not self._may_ask():
            self._begin_new_life("its numbers began anew")
            self.receive([(number, payload)])
            return
        if self._recent.knows(number):
            self._begin_new_life("its numbers began anew")
        self._held.add(number, payload)
        self._ask()  # tells whether it is one, if the number was too long ago to remember

    def _go_on_from(self, number: int, payload: bytes) -> None:
        self.last = number
        self._recent.remember(number, payload)
        self._apply([payload])

    # -- replay --

    def _may_ask(self) -> bool:
        return self.can_replay and self._schedule.may_ask

    def _ask(self, *, everything: bool = False, is_check: bool = False) -> None:
        now_s = self._clock()
        if self.last is None or self.last < 0:
            everything = True
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
            self._start_over(number - 1)
            return True
        assert self.last is not None
        if number < self.last:
            return False
        if number == self.last and self._recent.is_same(number, payload):
            order.is_proved = True
            return False
        if number == self.last:
            self._begin_new_life("other messages have its numbers")
            self._ask()
            return False
        order.is_proved, order.is_check = True, False
        if number == self.last + 1 and not self._may_be_another_life():
            return True  # nothing is missing, but the message before it
        self._late = range(self.last + 1, number)
        self._clear(trust.truncated(number - self.last - 1))
        self.last = number - 1
        return True

    def _may_be_another_life(self) -> bool:
        """Whether the connection broke since the last message, or a number went down."""
        return self._was_interrupted or self._held.has_up_to(self.last)

    def _start_over(self, last: int) -> None:
        """The messages behind number `last` follow; -1: all that there are."""
        self._forget()
        self.last = last
        self._flaw = trust.EXACT if last < 0 else trust.truncated(last + 1)

    def _apply_replayed(self, run: list[tuple[int, bytes]]) -> None:
        if not run:
            return
        for number, payload in run:
            self._recent.remember(number, payload)
        self.last = run[-1][0]
        self.num_recovered += len(run)
        self._schedule.progressed()
        self._apply([payload for _, payload in run])

    def _fail(self, reason: str) -> None:
        assert self.order is not None
        order = self.order
        self.num_failures += 1
        if order.is_check:
            self._leave_check()
            return
        if self._schedule.failed():
            self._ask(everything=order.asks_everything and not order.is_proved)
            return
        logger.warning("%s: replay failed again and again: %s", self._name, reason)
        self.order = None
        held = self._held.take()
        self._clear(trust.MUTE)
        if held:
            self.last = held[0][0] - 1
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
        held = self._held.take(num_waiting)
        if is_rising(held):
            self.receive([*held])
            return
        for number, payload in held:
            self._held.add(number, payload)
        self._ask()

    # -- effects --

    def _apply(self, payloads: list[bytes]) -> None:
        effect = self._sink.apply(payloads)
        if effect.cleared:
            self._flaw = trust.EXACT
        for reason in effect.defects:
            self._flaw = trust.unusable(reason)
        if effect.defects.keys() & _CURABLE and self._may_start_over and self._may_ask():
            self._may_start_over = False  # once: if it does not help, it is not the wire
            if self.order is None:
                self._ask(everything=True)

    def _begin_new_life(self, reason: str) -> None:
        logger.warning(
            "%s: the engine restarted (%s), its blocks are forgotten", self._name, reason
        )
        self.num_restarts += 1
        self._may_start_over = True
        self._forget()

    def _clear(self, flaw: TrustState) -> None:
        self._sink.clear()
        self._flaw = flaw

    def _forget(self) -> None:
        self._sink.clear()
        self._recent.forget()
        self.last = None
        self._late = range(0)
        self._flaw = trust.SILENT
