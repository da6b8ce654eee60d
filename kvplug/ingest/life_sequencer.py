"""Messages of a publisher of ours to packed events in the order in which it published them.

In:  messages as they arrive (kvplug/protocol.py), answers to asks, and the time.
Out: calls of a LifeSink, asks for whoever owns the sockets, and a TrustState.

No sockets and no threads here. A publisher numbers its events from 0 in each of its lives, and says
every 2 s which number is next.

    in order            applied
    seen before         dropped
    another life        what was known is cleared, and everything is asked for
    a life that was     dropped: what was left stays left, unless the present one is silent
    a gap               what is missing is asked for; live events wait for the end of the answer.
                        Either the missing ones come, or all that the engine holds, which replaces
                        what was known
    no answer           what was known is cleared: removals may be among what is lost. What comes
                        then is true, but not all: STALE until an answer comes or the engine clears
    no sign of life     STALE, and nothing is forgotten

EXACT: everything before the `next` of the last hello is applied, and nothing was unusable.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from msgspec import structs

from kvplug.ingest import trust
from kvplug.ingest.answer_order import INCOMPLETE, OUT_OF_ORDER, AnswerOrder, AskRequest
from kvplug.ingest.introduction import defect_of, has_other_blocks, summary_of
from kvplug.ingest.message_log import Effect, LifeSink, PendingMessages
from kvplug.ingest.replay import ReplaySchedule, ReplaySettings
from kvplug.ingest.trust import TrustState
from kvplug.packed import joined
from kvplug.protocol import (
    HEARTBEAT_S,
    Ask,
    End,
    Events,
    Hello,
    ProtocolError,
    ProtocolMessage,
    Resident,
    WorkerHello,
    decode,
    encode,
)
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

_NUM_PAST_LIVES: Final = 8
_SILENCE_S: Final = 3 * HEARTBEAT_S
# A publisher with ever new lives or gaps gets no more asks than that.
_ASK_EVERY_S: Final = 0.2


class LifeSequencer:
    """The face of a Sequencer: connected, disconnected; receive; replayed, replay_ended,
    replay_failed; tick, start_over.

    Set `can_replay` if an endpoint for asks was configured, and `can_ask_publisher` if one that the
    publisher names can be asked. Read: `state`, `request`, `last`, `life`, `about` (what the last
    hello said) and the counters.
    """

    def __init__(
        self,
        name: str,
        sink: LifeSink,
        skip: Callable[[str, int, str], None],
        *,
        clock: Callable[[], float],
        settings: ReplaySettings | None = None,
    ) -> None:
        """`skip`: told of what is refused: the reason, how much, and more about it."""
        self.request: AskRequest | None = None
        self.about: WorkerHello | None = None
        self.life: int | None = None
        self.next = 0
        self.can_replay = self.can_ask_publisher = False
        self.num_missed = self.num_duplicates = self.num_restarts = 0
        self.num_replays = self.num_recovered = self.num_failures = 0
        self.last_repair_s: float | None = None
        self._name, self._sink, self._skip, self._clock = name, sink, skip, clock
        self._settings = settings or ReplaySettings()
        self._schedule = ReplaySchedule(clock, self._settings)
        self._pending = PendingMessages(self._settings.max_pending_bytes)
        self._past: deque[int] = deque(maxlen=_NUM_PAST_LIVES)
        self._hello_next = self._num_tries = 0
        self._heard_at_s = self._began_s = self._next_ask_s = clock()
        self._said_at_s = 0.0  # by the publisher's clock
        # A hello of this life was heard; all before `next` is known; live events wait.
        self._is_introduced = self._is_complete = self._is_waiting = False
        self._refusal: str | None = None  # of all events, for what the hello says
        self._unreadable: str | None = None  # what came last
        self._defect: str | None = None
        self._fault: TrustState | None = None  # why nothing is waited for, though it is missing
        self._may_start_over = True
        self._lost_at_s: float | None = None

    @property
    def state(self) -> TrustState:
        """How much of the engine's blocks is known."""
        if self._lost_at_s is not None:
            return trust.DISCONNECTED if self.life is None else trust.INTERRUPTED
        if self.life is None or self._refusal is not None:
            reason = self._refusal or self._unreadable
            return trust.SILENT if reason is None else trust.unusable(reason)
        if self._is_overdue:
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

    def connected(self) -> None:
        """The stream is there (again)."""
        self._lost_at_s = None
        self._heard_at_s = self._clock()
        self._schedule.connected()
        if self.life is not None and self._refusal is None:
            self._wait()

    def disconnected(self) -> None:
        """The stream is gone; its life tells later whether it is the same publisher."""
        self._stop_asking()
        if self._lost_at_s is None:
            self._lost_at_s = self._clock()

    def tick(self) -> None:
        """Look at the time: answers that do not come, pauses and lost streams that end."""
        now_s, request = self._clock(), self.request
        if request is not None and now_s > min(request.deadline_s, request.expires_s):
            self.replay_failed("no answer", trust.ASKS_SILENT)
        if self._lost_at_s is not None:
            is_over = now_s - self._lost_at_s > self._settings.lost_after_s
            if is_over and self.life is not None:
                logger.warning("%s: its event stream is gone, its blocks are forgotten", self._name)
                self._forget(None)
        elif self._is_waiting:
            self._try_to_ask()
        elif self._fault is not None and self._may_ask() and self._refusal is None:
            self._ask(is_check=True)

    def start_over(self) -> None:
        """Ask for everything again if that is possible: what is known seems to be wrong."""
        is_able = self._lost_at_s is None and self._is_introduced and self._refusal is None
        if is_able and not self._is_waiting and self._may_ask():
            self._ask(is_check=True)

    # -- live messages --

    def receive(self, messages: list[Message]) -> None:
        """Live messages, in the order of their arrival."""
        run: list[Events] = []
        for message in messages:
            said = self._read(message.payload)
            if isinstance(said, Events) and self._follows(said, self.next + len(run)):
                run.append(said)
                continue
            self._apply_run(run)
            run = []
            self._receive_one(said, message)
        self._apply_run(run)

    def _follows(self, said: Events, next_: int) -> bool:
        return said.number == next_ and said.life == self.life and self._is_flowing

    def _receive_one(self, said: ProtocolMessage | None, message: Message) -> None:
        if isinstance(said, Events) and self._follows(said, self.next):
            self._apply(said)
        elif isinstance(said, Events):
            self._receive_odd(said, message)
        elif isinstance(said, Hello):
            self._hear(said)
        elif said is not None:
            self._skip(OUT_OF_ORDER, 1, f"a {type(said).__name__} on the stream;")

    @property
    def _is_flowing(self) -> bool:
        """Whether events are applied as they come."""
        return not self._is_waiting and self.request is None and self._refusal is None

    @property
    def _is_overdue(self) -> bool:
        return self._clock() - self._heard_at_s > _SILENCE_S

    def _read(self, payload: bytes) -> ProtocolMessage | None:
        try:
            return decode(payload)
        except ProtocolError as error:
            self._skip(error.reason, 1, str(error))
            if error.reason == "unsupported_version" or self.life is None:
                self._unreadable = error.reason
            return None

    def _hear(self, hello: Hello) -> None:
        if not self._is_present(hello.life):
            return
        self._heard_at_s, self._unreadable = self._clock(), None
        self._hello_next, self._said_at_s = hello.next, hello.sent_at
        self._learn(hello.about)
        if self._refusal is not None:
            return
        if self._is_waiting:
            if self._is_complete and not self._pending and hello.next == self.next:
                self._stop_waiting()
            self._try_to_ask()
        elif hello.next > self.next:
            self.num_missed += hello.next - self.next
            self._wait()

    def _learn(self, about: WorkerHello) -> None:
        """What a hello, live or in an answer, says that is news."""
        former = self.about if self._is_introduced else None
        if about == former and self._refusal is None:  # what was in the way may have passed
            return
        self.about, self._is_introduced = about, True
        needs_all = self._refusal is not None or has_other_blocks(former, about)
        if needs_all:
            self._drop_blocks()
        before, self._refusal = self._refusal, self._sink.introduce(about)
        if self._refusal is not None:
            self._skip(self._refusal, int(self._refusal != before), summary_of(about))
            self._stop_waiting()
            self._drop_blocks()
        elif needs_all:
            self._wait()

    def _receive_odd(self, said: Events, message: Message) -> None:
        """Events that do not simply follow the last ones."""
        if not self._is_present(said.life):
            return
        if self._refusal is not None:
            self._skip(self._refusal, 1, "")
        elif said.number < self.next and (self._is_complete or not self._is_waiting):
            self.num_duplicates += 1
        elif self._is_waiting:
            self._wait_with(said, message)
        elif said.number == self.next:
            self._keep(said, message)  # a check is open, whose answer may be older
            self._apply(said)
        else:
            self.num_missed += said.number - self.next
            self._keep(said, message)
            self._wait()

    def _wait_with(self, said: Events, message: Message) -> None:
        """It may be what was missing, if that was only late."""
        if self._is_complete and said.number == self.next and not self._pending:
            self._apply(said)
            if self.next >= self._hello_next:
                self._stop_waiting()
            return
        self._keep(said, message)
        self._try_to_ask()

    def _keep(self, said: Events, message: Message) -> None:
        self._pending.add(Message(message.topic, said.number, message.payload))

    def _is_present(self, life: int) -> bool:
        """Whether messages of this life are listened to; a new one begins."""
        if life == self.life:
            return True
        if life in self._past and not self._is_overdue:
            self._skip("past_life", 1, "")
            return False
        if self.life is not None:
            is_seldom = self._clock() >= self._next_ask_s  # or the log would be theirs
            log = logger.warning if is_seldom else logger.debug
            log("%s: its publisher began a new life", self._name)
            self.num_restarts += 1
            self._past.append(self.life)
        if life in self._past:
            self._past.remove(life)
        self._forget(life)
        self._heard_at_s = self._clock()
        self._schedule.connected()
        self._wait()
        return True

    # -- asks --

    def replayed(self, messages: list[Message]) -> None:
        """Messages of the answer to `request`, as they arrive."""
        request = self.request
        for message in messages:
            if request is None or self.request is not request:
                return  # of an ask that was given up, or is done
            said = self._read(message.payload)
            if said is None:
                self.replay_failed("it cannot be read", trust.BAD_ANSWERS)
                return
            reason = request.order.refuses(said)
            if reason is not None:
                self._refuse_answer(reason)
                return
            request.deadline_s = self._clock() + self._settings.answer_timeout_s
            self._take_answer(request, said)

    def replay_ended(self) -> None:
        """There is no more; an answer that is complete was taken before."""
        if self.request is not None:
            self._refuse_answer(INCOMPLETE)

    def replay_failed(self, reason: str, fault: TrustState = trust.ASKS_SILENT) -> None:
        """The publisher cannot be asked, or its answer is of no use."""
        if self.request is None:
            return
        self.num_failures += 1
        self._num_tries += 1
        self.request = None
        if not self._is_waiting:  # a check: nothing is worse than before
            self._pending.take()
        if self._schedule.failed():
            return  # the next tick asks again
        logger.warning("%s: asks fail again and again: %s", self._name, reason)
        if self._is_waiting:
            self._go_on_without(fault)

    def _refuse_answer(self, reason: str) -> None:
        self._skip(reason, 1, "in an answer;")
        self.replay_failed(f"an answer is refused: {reason}", trust.BAD_ANSWERS)

    def _take_answer(self, request: AskRequest, said: ProtocolMessage) -> None:
        match said:
            case Hello():
                self._hello_next = max(self._hello_next, said.next)
                if said.sent_at >= self._said_at_s or not self._is_introduced:
                    self._learn(said.about)
            case Events():
                self.num_recovered += 1
                if said.number == self.next:
                    self._apply(said)
            case Resident():
                self._take_part(request, said)
            case End():
                self._finish(request, said)

    def _take_part(self, request: AskRequest, said: Resident) -> None:
        self.num_recovered += 1
        if said.part == 0:
            self._drop_blocks()
            self._is_waiting, request.is_check = True, False
        effect = self._sink.apply_packed(said.packed, 0.0)
        for reason in effect.defects if effect is not None else ():
            self._defect = reason

    def _finish(self, request: AskRequest, end: End) -> None:
        """The answer is complete, and applied."""
        if request.order.is_resident:
            self.next, self._is_complete = end.next, True
        if end.next < request.hello_next:  # it had said that there are more
            self._refuse_answer(INCOMPLETE)
            return
        self.request, self._fault, self._is_waiting = None, None, False
        self._num_tries = 0
        self._schedule.progressed()
        self._may_start_over |= self._defect is None
        self.last_repair_s = self._clock() - request.began_s
        waited = self._pending.take()
        self.receive([each for each in waited if (each.sequence or 0) >= self.next])
        if not self._is_waiting and self._hello_next > self.next:
            self._wait()  # what did not find room

    def _wait(self) -> None:
        """Something is missing: live events wait for an answer."""
        if not self._is_waiting:
            self._is_waiting, self._began_s = True, self._clock()
        self._try_to_ask()

    def _try_to_ask(self) -> None:
        if self._lost_at_s is not None or self.request is not None or not self._is_waiting:
            return
        if not self._is_introduced and not self.can_replay:
            return  # a hello says whom to ask
        if not self._can_ask():
            self._go_on_without(trust.NO_ASKS)
        elif not self._schedule.may_ask:
            self._go_on_without(self._fault or trust.ASKS_SILENT)
        elif self._may_ask():
            self._ask()

    def _can_ask(self) -> bool:
        return self.can_replay or self._answers_at() is not None

    def _may_ask(self) -> bool:
        is_due = self._clock() >= self._next_ask_s and self.request is None
        return is_due and self._can_ask() and self._schedule.may_ask

    def _answers_at(self) -> str | None:
        if self.about is None or not self._is_introduced or not self.can_ask_publisher:
            return None
        return self.about.answers_at

    def _ask(self, *, is_check: bool = False) -> None:
        assert self.life is not None
        now_s = self._clock()
        asks_all = is_check or not self._is_complete
        named = self._answers_at()
        is_configured = self.can_replay and (named is None or self._num_tries % 2 == 0)
        self.num_replays += 1
        self._next_ask_s = now_s + _ASK_EVERY_S
        self.request = AskRequest(
            payload=encode(Ask(0, 0) if asks_all else Ask(self.life, self.next)),
            endpoint=None if is_configured else named,
            began_s=now_s if is_check else self._began_s,
            deadline_s=now_s + self._settings.answer_timeout_s,
            expires_s=now_s + self._settings.max_answer_s,
            is_check=is_check,
            order=AnswerOrder(self.life, None if asks_all else self.next),
            hello_next=self._hello_next,
        )

    def _stop_asking(self) -> None:
        self.request = None
        self._pending.take()

    def _stop_waiting(self) -> None:
        self._stop_asking()
        self._is_waiting = False

    def _go_on_without(self, fault: TrustState) -> None:
        """Nobody answers: what was known goes, live events count.

        Unless nothing is known to be missing, or not even of what blocks they are: a hello tells.
        """
        is_all_known = self._is_complete and not self._pending and self._hello_next <= self.next
        if is_all_known or not self._is_introduced:
            return
        waited = self._pending.take()
        self.request, self._is_waiting = None, False
        self._drop_blocks()
        self._fault = fault
        self.next = waited[0].sequence or 0 if waited else self._hello_next
        self.receive(waited)

    # -- what is known --

    def _apply_run(self, run: list[Events]) -> None:
        """Events in a row, in one call if that is possible: it costs as much as 100 blocks."""
        at = 0
        while at < len(run):
            whole, num_joined = joined([said.packed for said in islice(run, at, None)])
            last = run[at + num_joined - 1]
            self._apply(last if num_joined == 1 else structs.replace(last, packed=whole))
            at += num_joined

    def _apply(self, said: Events) -> None:
        effect = self._sink.apply_packed(said.packed, said.sent_at)
        self.next = said.number + 1
        if effect is not None:
            self._note(effect)

    def _note(self, effect: Effect) -> None:
        if effect.cleared:  # what is not there cannot be missing
            self._is_complete, self._fault, self._defect = True, None, None
        for reason in effect.defects:
            self._defect = reason
        if effect.is_repairable and self._may_start_over and self._is_flowing:
            self._may_start_over = False  # if it does not help, it is not the wire
            self.start_over()

    def _drop_blocks(self) -> None:
        self._sink.clear()
        self._is_complete, self._defect = False, None

    def _forget(self, life: int | None) -> None:
        """Nothing is known but which life it is."""
        self._stop_waiting()
        self._drop_blocks()
        self.life, self.next, self._hello_next = life, 0, 0
        self._is_introduced = False
        self._refusal = self._fault = None
        self._may_start_over = True
