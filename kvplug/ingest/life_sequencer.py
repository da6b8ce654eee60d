"""Messages of a publisher of ours to packed events in the order in which it published them.

In:  messages as they arrive (kvplug/protocol.py), answers to asks, and the time.
Out: calls of a LifeSink, asks for whoever owns the sockets, and a TrustState.

No sockets and no threads here. A publisher numbers its events from 0 in each of its lives, and says
every 2 s which number is next.

    in order            applied
    seen before         dropped
    another life        what was known is cleared, and everything is asked for, unless the first
                        message has number 0: a life begins with nothing
    a life that was     dropped: what was left stays left, unless the present one is silent
    a gap               what is missing is asked for; events wait for the end of the answer, or for
                        those that are missing to come. The answer has them, or all that the engine
                        holds, which replaces what was known
    no answer           what was known is cleared: removals may be among what is lost. What comes
                        then is true, but not all: STALE until an answer comes or the engine clears
    no sign of life     STALE, and nothing is forgotten

A stream may keep messages, so that they come late, or twice (`Message.is_live`). They are applied
like any others, and are no sign of life. EXACT: everything before the `next` of the last hello is
applied, nothing was unusable, and the publisher was heard within 4 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

from msgspec import structs

from kvplug.ingest import trust
from kvplug.ingest.answer_order import INCOMPLETE, OUT_OF_ORDER, AskRequest
from kvplug.ingest.asks import Asks
from kvplug.ingest.introduction import has_other_blocks, summary_of
from kvplug.ingest.known_life import KnownLife
from kvplug.ingest.message_log import Effect, LifeSink
from kvplug.ingest.position import FollowerPosition
from kvplug.ingest.replay import ReplaySettings
from kvplug.ingest.trust import TrustState
from kvplug.packed import joined
from kvplug.protocol import (
    Ask,
    End,
    Events,
    Hello,
    ProtocolError,
    ProtocolMessage,
    Resident,
    WorkerHello,
    decode,
)
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)


class LifeSequencer(KnownLife):
    """The face of a Sequencer: connected, disconnected; receive; replayed, replay_ended,
    replay_failed; tick, start_over. And interrupted, resumed; position, resume.

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
        self._settings = settings or ReplaySettings()
        super().__init__(sink, clock, self._settings.max_pending_bytes)
        self.request: AskRequest | None = None
        self.can_replay = self.can_ask_publisher = False
        self.num_missed = self.num_duplicates = self.num_restarts = 0
        self.num_replays = self.num_recovered = self.num_failures = 0
        self.last_repair_s: float | None = None
        self._name, self._skip = name, skip
        self._asks = Asks(clock, self._settings)
        self._began_s = clock()
        self._said_at_s = 0.0  # by the publisher's clock
        self._may_start_over = True

    def connected(self) -> None:
        """The stream is there (again)."""
        self._lost_at_s = None
        self._lives.heard()
        self._asks.connected()
        if self.life is not None and self._refusal is None:
            self._wait()

    def interrupted(self) -> None:
        """Nobody can be heard or asked; what is published meanwhile comes later."""
        self._is_interrupted, self.request = True, None
        self._lives.silenced()
        if not self._is_waiting:
            self._pending.take()

    def resumed(self) -> None:
        """The stream goes on where it was; a sign of life tells whether that is all."""
        if self._lost_at_s is not None:  # something may be lost that was on its way
            self._lives.silenced()
        self._is_interrupted, self._lost_at_s = False, None
        self._asks.connected()

    def resume(self, position: FollowerPosition) -> None:
        """Go on from there, before the first message; the sink has the blocks already."""
        self._lives.restore(position.life, position.past_lives)
        self.next, self._hello_next = position.next, position.known_next
        self._is_complete, self._defect = position.is_complete, position.defect
        if position.about is not None:
            self._learn(position.about)
        if self._refusal is None and not (self._is_complete and self._hello_next <= self.next):
            self._begin_waiting()

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
                self._forget()
                self._lives.forget()
        elif self._is_waiting:
            self._try_to_ask()
        elif self._fault is not None and self._may_ask() and self._refusal is None:
            self._ask(is_check=True)

    def start_over(self) -> None:
        """Ask for everything again if that is possible: what is known seems to be wrong."""
        is_able = self._is_introduced and self._refusal is None and not self._is_waiting
        if is_able and self._may_ask():
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
            self._hear(said, is_live=message.is_live)
        elif said is not None:
            self._skip(OUT_OF_ORDER, 1, f"a {type(said).__name__} on the stream;")

    @property
    def _is_flowing(self) -> bool:
        """Whether events are applied as they come."""
        return not self._is_waiting and self.request is None and self._refusal is None

    def _read(self, payload: bytes) -> ProtocolMessage | None:
        try:
            return decode(payload)
        except ProtocolError as error:
            self._skip(error.reason, 1, str(error))
            if error.reason == "unsupported_version" or self.life is None:
                self._unreadable = error.reason
            return None

    def _hear(self, hello: Hello, *, is_live: bool) -> None:
        if not self._is_present(hello.life, hello.next, is_live=is_live):
            return
        if is_live:
            self._lives.heard()
        elif hello.next < self.next:
            return  # it came before
        self._unreadable = None
        self._hello_next = hello.next if is_live else max(hello.next, self._hello_next)
        self._said_at_s = hello.sent_at
        self._learn(hello.about)
        if self._refusal is not None:
            return
        if self._is_waiting:
            if hello.next >= self.next:
                self._fill()
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
        if not self._is_present(said.life, said.number, is_live=message.is_live):
            return
        if self._refusal is not None:
            self._skip(self._refusal, 1, "")
        elif said.number < self.next and (self._is_complete or not self._is_waiting):
            self.num_duplicates += 1
        elif self._is_waiting:
            self._wait_with(said, message)
        elif said.number == self.next:
            self._pending.keep(message, said.number)  # a check is open, whose answer may be older
            self._apply(said)
        else:
            self.num_missed += said.number - self.next
            self._begin_waiting()
            self._wait_with(said, message)

    def _wait_with(self, said: Events, message: Message) -> None:
        """It may be what was missing, if that was only late."""
        self._pending.keep(message, said.number)
        self._fill()
        self._try_to_ask()

    def _fill(self) -> None:
        """Apply what waits, if nothing is missing any more."""
        if not (self._is_waiting and self._is_complete and self._is_introduced):
            return
        if self._refusal is None and self._pending.has_all_up_to(self._hello_next):
            waited = self._pending.take_in_order(self.next)
            self._stop_waiting()
            self.receive(waited)

    def _is_present(self, life: int, number: int, *, is_live: bool) -> bool:
        """Whether messages of this life are listened to; a new one begins with this number."""
        if life == self.life:
            return True
        if not self._lives.admits(life, is_live=is_live):
            self._skip("past_life", 1, "")
            return False
        if self.life is not None:
            is_seldom = self._asks.is_due  # or the log would be theirs
            log = logger.warning if is_seldom else logger.debug
            log("%s: its publisher began a new life", self._name)
            self.num_restarts += 1
        self._forget()
        self._lives.begin(life, is_live=is_live)
        self._is_complete = number == 0  # a life begins with nothing
        self._asks.connected()
        self._begin_waiting()
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
            self._asks.goes_on(request)
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
        self.request = None
        if not self._is_waiting:  # a check: nothing is worse than before
            self._pending.take()
        if self._asks.failed():
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
        self._asks.succeeded()
        self._may_start_over |= self._defect is None
        self.last_repair_s = self._clock() - request.began_s
        self.receive(self._pending.take_in_order(self.next))
        if not self._is_waiting and self._hello_next > self.next:
            self._wait()  # what did not find room

    def _wait(self) -> None:
        """Something is missing: events wait for an answer."""
        self._begin_waiting()
        self._try_to_ask()

    def _begin_waiting(self) -> None:
        if not self._is_waiting:
            self._is_waiting, self._began_s = True, self._clock()
            self._pending.begin(self.next)

    @property
    def _is_cut_off(self) -> bool:
        return self._lost_at_s is not None or self._is_interrupted

    def _try_to_ask(self) -> None:
        if self._is_cut_off or self.request is not None or not self._is_waiting:
            return
        if not self._is_introduced and not self.can_replay:
            return  # a hello says whom to ask
        if not self._can_ask:
            self._go_on_without(trust.NO_ASKS)
        elif self._asks.is_paused:
            self._go_on_without(self._fault or trust.ASKS_SILENT)
        elif self._may_ask():
            self._ask()

    @property
    def _can_ask(self) -> bool:
        return self.can_replay or self._answers_at is not None

    def _may_ask(self) -> bool:
        is_free = self.request is None and not self._is_cut_off
        return is_free and self._can_ask and self._asks.may_ask

    @property
    def _answers_at(self) -> str | None:
        if self.about is None or not self._is_introduced or not self.can_ask_publisher:
            return None
        return self.about.answers_at

    def _ask(self, *, is_check: bool = False) -> None:
        assert self.life is not None
        asks_all = is_check or not self._is_complete
        self.num_replays += 1
        self.request = self._asks.request(
            Ask(0, 0) if asks_all else Ask(self.life, self.next),
            self._answers_at,
            is_configured=self.can_replay,
            life=self.life,
            hello_next=self._hello_next,
            began_s=None if is_check else self._began_s,
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
        waited = self._pending.take_in_order(0)
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

    def _forget(self) -> None:
        """Nothing is known but which life it is."""
        self._stop_waiting()
        self._drop_blocks()
        self.next = self._hello_next = 0
        self._is_introduced = False
        self._refusal = self._fault = None
        self._may_start_over = True
