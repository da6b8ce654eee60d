"""What a stock publisher (vLLM, SGLang, LMCache) says over ZMQ, as a life of kvplug's own stream.

In:  its messages, live and replayed, put in order by a Sequencer.
Out: hellos and events of kvplug/protocol.py, answers to asks; counts of what cannot be used.

If events are lost for good on this side, the hello says so among its defects, so that readers know
that blocks are missing, until the engine clears its cache or restarts. When known blocks must be
forgotten, a new life begins, which holds nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvplug import codec, protocol
from kvplug._version import __version__
from kvplug.engines.answer_maker import AnswerMaker
from kvplug.engines.life import Life, Numbered
from kvplug.errors import DecodeError
from kvplug.events import EventBatch
from kvplug.forwarder.config import ZmqKvEventPublisherConfig
from kvplug.forwarder.doubts import FORGOTTEN, doubts_of
from kvplug.forwarder.output import Outgoing, Said
from kvplug.ingest.message_log import Effect
from kvplug.ingest.replay import ReplaySettings, Request
from kvplug.ingest.sequencer import Sequencer
from kvplug.ingest.trust import TrustState
from kvplug.protocol import Ask, End, WorkerHello
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 17  # of a resident set, in messages


class StockWire:
    """A Wire (kvplug/forwarder/output.py), and the sink of its Sequencer."""

    def __init__(
        self,
        name: str,
        config: ZmqKvEventPublisherConfig,
        dp_rank: int,
        send: Callable[[list[Outgoing]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        settings: ReplaySettings | None = None,
    ) -> None:
        self.sequencer = Sequencer(name, self, clock=clock, settings=settings)
        self.skipped: Counter[str] = Counter()
        self.life = Life(_about(config, dp_rank))
        self._name, self._dp_rank, self._send = name, dp_rank, send
        self._maker, self._answers_all = AnswerMaker(self.life), config.enable_local_indexer
        self._last_beat: bytes | None = None
        self._state: TrustState | None = None
        self.life.doubt(FORGOTTEN)

    # -- from the event thread --

    @property
    def state(self) -> TrustState:
        """How much of the engine's blocks is known here."""
        return self.sequencer.state

    @property
    def num_blocks(self) -> int:
        """How many blocks the engine holds, as far as that is known here."""
        return self.life.num_blocks

    @property
    def request(self) -> Request | None:
        """What the engine is to be asked for."""
        return self.sequencer.request

    def start(self) -> None:
        """Say that a life has begun, which holds nothing yet."""
        self._tell([self.life.hello()])

    def connected(self, *, can_replay: bool) -> None:
        """The stream is there (again)."""
        self.sequencer.can_replay = can_replay
        self.sequencer.connected()
        self.note_state()

    def disconnected(self) -> None:
        """The stream is gone."""
        self.sequencer.disconnected()
        self.note_state()

    def receive(self, messages: list[Message]) -> None:
        """Live messages."""
        self.sequencer.receive(messages)
        self.note_state()

    def replayed(self, messages: list[Message]) -> None:
        """A part of the answer to `request`."""
        self.sequencer.replayed(messages)
        self.note_state()

    def replay_ended(self) -> None:
        """The answer is complete."""
        self.sequencer.replay_ended()
        self.note_state()

    def tick(self) -> None:
        """Time has passed."""
        self.sequencer.tick()
        self.note_state()

    # -- from the sequencer --

    def apply(self, payloads: list[bytes]) -> Effect:
        """Say what they say."""
        num_cleared, before = self.life.num_cleared, Counter(self.life.defects)
        try:
            messages = self.life.apply([self._batch_of(each) for each in payloads])
        except Exception:  # a new life has begun
            logger.exception("%s: events could not be told", self._name)
            messages = [self.life.hello()]
        self._tell(messages)
        has_cleared = self.life.num_cleared != num_cleared
        more = self.life.defects if has_cleared else self.life.defects - before
        return Effect(cleared=has_cleared, defects=Counter(more))

    def clear(self) -> None:
        """What was said is not known any more."""
        self.life.doubt(FORGOTTEN)  # until the sequencer says why
        if self.life.position[1] or self.life.defects:
            self.life.begin_anew()
            self._tell([self.life.hello()])

    def note_state(self) -> None:
        """Say how much of the engine's blocks is known, if that is news."""
        state = self.sequencer.state
        if state == self._state and not self.life.has_news:
            return
        self._state = state
        self.life.doubt(doubts_of(state))
        if self.life.has_news:
            self._tell([self.life.hello()])

    def _batch_of(self, payload: bytes) -> EventBatch:
        try:
            batch = codec.decode(payload)
        except DecodeError as error:
            return self._nothing("undecodable", 1, str(error))
        if batch.dp_rank not in (None, self._dp_rank):
            detail = f"expected data-parallel rank {self._dp_rank}, got {batch.dp_rank}"
            return self._nothing("other_rank", len(batch.events), detail)
        for reason, count in batch.skipped.items():
            self._skip(reason, count, "")
        return batch

    def _nothing(self, reason: str, count: int, detail: str) -> EventBatch:
        self._skip(reason, count, detail)
        return EventBatch(events=(), skipped={reason: count})

    def _skip(self, reason: str, count: int, detail: str) -> None:
        if not self.skipped[reason]:
            logger.warning("%s: events skipped: %s %s", self._name, reason, detail)
        self.skipped[reason] += count

    def _tell(self, messages: list[Numbered]) -> None:
        self._send(
            [
                Outgoing(_life_of(payload), number, payload, number + protocol.is_events(payload))
                for number, payload in messages
            ]
        )

    # -- from the connection's loop --

    @property
    def backlog_bytes(self) -> int:
        """About as much as a resident set."""
        return self.life.num_blocks * _BLOCK_BYTES

    def beat(self, said: Said) -> bytes | None:
        """A hello with the number that the stream ends with, or if it takes nothing, the next."""
        next_ = self.life.position[1] if said.takes_nothing else said.following
        beat = self.life.beat(next_)
        # The event thread may have begun a life of which the outbox knows nothing yet.
        if _life_of(beat) == said.life:
            self._last_beat = beat
        return self._last_beat

    def on_alone(self) -> None:
        """Readers follow the namesake's life, and would pass over this one as an older one."""
        self.life.renew()
        self._tell([self.life.hello()])

    def on_drop(self) -> None:
        """Readers see the hole by the true number."""
        self._tell([self.life.hello()])

    # -- from a thread for answers --

    @property
    def pause_s(self) -> float:
        """How long until another resident set may be made."""
        return self._maker.pause_s

    def read(self, request: bytes) -> Ask | None:
        """The ask in a message; None if it is none."""
        return self._maker.read(request)

    def may_answer(self, ask: Ask) -> bool:
        """Whether it can be answered now."""
        return self._maker.may_answer(ask)

    def answer(self, ask: Ask) -> list[Numbered]:
        """A hello, past events or all that the engine holds, and an end."""
        if self._answers_all or self.life.has(ask):
            return self._maker.answer(ask)
        life, next_ = self.life.settled()
        end = protocol.encode(End(life, next_))  # which says that there is more
        return [Numbered(next_, self.life.beat(next_)), Numbered(next_, end)]


def _about(config: ZmqKvEventPublisherConfig, dp_rank: int) -> WorkerHello:
    is_url = config.worker_id.startswith(("http://", "https://"))
    return WorkerHello(
        kvplug_version=__version__,
        block_size=config.kv_block_size,
        dp_rank=dp_rank,
        dp_size=config.dp_size,
        url=config.worker_id if is_url else "",
        hides_states=config.hides_states,
    )


def _life_of(payload: bytes) -> int:
    # Not what the life is now: another thread may have begun one.
    return protocol.decode(payload).life
