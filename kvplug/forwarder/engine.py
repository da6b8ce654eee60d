"""One publisher of an engine: its stream over ZMQ in, its subjects on NATS out.

In:  what the event thread receives (kvplug/ingest/event_thread.py).
Out: messages on NATS, by the wire that the publisher speaks; health.

Its first message says which wire that is. kvplug's own publishers say a hello to each newcomer, so
one that is connected and silent is a stock publisher that has stored nothing. Until then nothing is
published about it, as a life invented here would not be its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import groupby
from typing import Final

from kvplug import codec
from kvplug.errors import DecodeError
from kvplug.events import Rank
from kvplug.forwarder.config import ZmqKvEventPublisherConfig
from kvplug.forwarder.output import Outgoing, Output
from kvplug.forwarder.own_wire import OwnWire
from kvplug.forwarder.stock_wire import StockWire
from kvplug.ingest import trust
from kvplug.ingest.replay import ReplaySettings, Request
from kvplug.ingest.trust import TrustState
from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import PublisherName
from kvplug.protocol import HEARTBEAT_S, is_ours
from kvplug.transports.base import Message

logger = logging.getLogger(__name__)

_SILENT_S: Final = 1.5 * HEARTBEAT_S


class ForwardedEngine:
    """The event thread feeds it as it feeds a Follower. close from any thread, once it does not.

    Read: rank, connected, trust, wire and output (None before its first message), num_messages,
    num_malformed.
    """

    def __init__(
        self,
        config: ZmqKvEventPublisherConfig,
        dp_rank: int,
        connection: NatsConnection,
        *,
        clock: Callable[[], float] = time.monotonic,
        settings: ReplaySettings | None = None,
    ) -> None:
        self.rank = Rank(config.worker_id, dp_rank)
        self.connected = self.can_replay = self.can_ask_publisher = False
        self.num_messages = self.num_malformed = 0
        self.wire: StockWire | OwnWire | None = None
        self.output: Output | None = None
        self._config, self._connection = config, connection
        self._clock, self._settings = clock, settings
        self._connected_s = clock()

    @property
    def trust(self) -> TrustState:
        """How much of the engine's blocks is known here, and why not more."""
        if self.wire is not None:
            return self.wire.state
        return trust.SILENT if self.connected else trust.NEVER_CONNECTED

    @property
    def num_skipped(self) -> int:
        """What could not be passed on: messages, or events of them."""
        more = 0 if self.wire is None else sum(self.wire.skipped.values())
        return self.num_malformed + more

    @property
    def replay_request(self) -> Request | None:
        """What the engine is to be asked for."""
        return None if self.wire is None else self.wire.request

    def on_connected(self) -> None:
        """The publisher is there (again)."""
        self.connected, self._connected_s = True, self._clock()
        logger.info("%s: event stream connected", self.rank)
        if self.wire is not None:
            self.wire.connected(can_replay=self.can_replay)

    def on_disconnected(self) -> None:
        """The publisher is gone."""
        if self.connected:
            logger.warning("%s: event stream lost", self.rank)
        self.connected = False
        if self.wire is not None:
            self.wire.disconnected()

    def receive(self, messages: list[Message]) -> None:
        """Pass them on, by the wire that each is of."""
        well_formed = [each for each in messages if each.malformed is None]
        self.num_messages += len(messages)
        self.num_malformed += len(messages) - len(well_formed)
        for are_ours, run in groupby(well_formed, key=lambda each: is_ours(each.payload)):
            part = list(run)
            if self.wire is None or are_ours is not isinstance(self.wire, OwnWire):
                if not are_ours and self.wire is not None and not any(map(_is_stock, part)):
                    self.num_malformed += len(part)
                    continue  # no change of the wire, but damage
                self._speak(are_ours=are_ours)
            assert self.wire is not None
            self.wire.receive(part)

    def replayed(self, messages: list[Message]) -> None:
        """A part of the answer to `replay_request`."""
        if self.wire is not None:
            self.wire.replayed([each for each in messages if each.malformed is None])

    def replay_ended(self) -> None:
        """The answer is complete."""
        if self.wire is not None:
            self.wire.replay_ended()

    def tick(self) -> None:
        """Time has passed."""
        if self.wire is not None:
            self.wire.tick()
        elif self.connected and self._clock() - self._connected_s > _SILENT_S:
            self._speak(are_ours=False)

    def close(self) -> None:
        """Send what waits, for a second at most."""
        if isinstance(self.wire, OwnWire):
            self.wire.disconnected()  # or the thread of an answer would outlive all
        if self.output is not None:
            self.output.close()

    def _speak(self, *, are_ours: bool) -> None:
        """From now on, by this wire."""
        logger.info("%s: its publisher speaks %s wire", self.rank, _NAME_OF[are_ours])
        if self.wire is not None:
            self.wire.disconnected()
        if self.output is not None:
            self.output.abandon()
        self.wire = self._wire_of(are_ours=are_ours)
        name = PublisherName(self.rank.worker, self.rank.dp_rank)
        self.output = Output(self._connection, name, self.wire)
        self.wire.start()
        if self.connected:
            self.wire.connected(can_replay=self.can_replay)

    def _wire_of(self, *, are_ours: bool) -> StockWire | OwnWire:
        name, clock, settings = str(self.rank), self._clock, self._settings
        if are_ours:
            return OwnWire(name, self._send, self._beat_soon, clock=clock, settings=settings)
        rank = self.rank.dp_rank
        return StockWire(name, self._config, rank, self._send, clock=clock, settings=settings)

    def _send(self, messages: list[Outgoing]) -> None:
        assert self.output is not None
        self.output.send(messages)

    def _beat_soon(self) -> None:
        assert self.output is not None
        self.output.beat_soon()


_NAME_OF: Final = {True: "kvplug's own", False: "a stock"}


def _is_stock(message: Message) -> bool:
    try:
        codec.decode(message.payload)
    except DecodeError:
        return False
    return True
