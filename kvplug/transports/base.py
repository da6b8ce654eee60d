"""What a transport of event streams is: the contract that the event thread relies on.

In:  endpoints and topics.
Out: messages with their sequence numbers, connection changes, and answers to replay requests.

The event thread (kvplug/ingest/event_thread.py) makes, uses and closes all objects of a transport;
only `Transport.check` is called from other threads. No call waits. What cannot be opened raises
TransportError; whatever a source or its answer raises, the event thread closes the source, counts
the publisher as disconnected, and opens another source after a pause of 0.5 to 10 s.

A source is served when one of its descriptors is readable, and every 0.2 s in any case. So what is
due by the clock, as another attempt to connect, can be done in `connection_changes`.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol, runtime_checkable

import msgspec


class Message(msgspec.Struct, frozen=True, gc=False):
    """What a publisher sent.

    topic: decides, on a bound source, which follower gets the message; of a malformed one what can
    be read of it, else empty.
    sequence: its number in this incarnation of the publisher, from 0; None if it has none.
    malformed: why it cannot be read, for a message that is none; it has no payload then.
    is_live: it was published just now; one that was kept for readers may be old, and come again.
    """

    topic: bytes
    sequence: int | None
    payload: bytes
    malformed: str | None = None
    is_live: bool = True


class Connection(Enum):
    """What happened to the connection of a source.

    INTERRUPTED and RESUMED are of bound sources only: nobody can be heard or asked for a while, and
    what is published meanwhile is kept for later.
    """

    OPENED = "opened"
    LOST = "lost"
    INTERRUPTED = "interrupted"
    RESUMED = "resumed"


class ReplayAnswer(Protocol):
    """The answer to one replay request, as it arrives. `is_ended`: all of it was received.

    If its connection is lost before that, it stays open and silent, and the request fails at its
    time limit, as without an answer.
    """

    is_ended: bool

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when there may be something to receive, asked for once.

        Without any, it is served every 0.2 s. At a lost connection they must not stay readable:
        the event thread would not pause until the time limit.
        """

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived; may set `is_ended`."""

    def close(self) -> None:
        """Give up the rest; safe to call twice."""


class EventSource(Protocol):
    """A subscription to one publisher, or, if it was bound, to all that connect to it.

    A connected source is used for one connection: OPENED when its publisher is there, at once or
    later, and LOST when it is gone. Then the event thread closes it, with all that it has not
    received, and connects another. A bound source stays open.
    """

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when there may be something to receive, asked for once:
        the source keeps them until it is closed.

        They may be edge-triggered: after a wake-up, call `connection_changes` and then `receive`
        until it returns fewer messages than it may.
        """

    def connection_changes(self) -> list[Connection]:
        """What happened since the last call, in order. A bound source has one per publisher.

        A transport that sees the end of a stream reports LOST once the last message was received.
        """

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived, in order; one that cannot be read is malformed.

        TransportError if what follows cannot be read either, as after a wrong length.
        """

    def request_replay(self, request: bytes, endpoint: str | None) -> ReplayAnswer:
        """Ask for messages: a stock publisher with the number of the first one in 8 bytes, ours
        with an Ask (kvplug/protocol.py).

        endpoint: None for the replay endpoint that the source was opened with; else one that the
        publisher named, in which a host of `*`, or an address of all interfaces, stands for the
        host that the source is connected to.
        TransportError if nobody can be asked, or the transport has no replays: it is logged, the
        request fails at its time limit, and the stream goes on.
        """

    def close(self) -> None:
        """Drop what is queued; safe to call twice."""


@runtime_checkable
class AskingSource(EventSource, Protocol):
    """A bound source whose publishers can be asked, each by the topic of its messages."""

    def ask(self, topic: str, request: bytes) -> ReplayAnswer:
        """As request_replay, of the publisher with this topic."""


class Transport(Protocol):
    """Opens sources. One object serves all endpoints of its schemes (kvplug/transports)."""

    def check(self, endpoint: str) -> None:
        """TransportError if this is no endpoint, of events or replays, to connect to. From any
        thread.
        """

    def replay_of(self, endpoint: str) -> str | None:
        """Where the publisher at this endpoint takes replay requests, if that need not be said.
        From any thread.
        """

    def connect(self, endpoint: str, topic: str, replay: str | None) -> EventSource:
        """Subscribe to topics that begin with `topic`; `replay` answers replay requests.

        Succeeds while nobody listens at either endpoint: engines may start after the router.
        """

    def bind(self, endpoint: str, topic: str) -> tuple[EventSource, str]:
        """Let publishers connect; also returns the endpoint with the port that was taken.

        TransportError if it cannot be bound, or if publishers of this transport never connect.
        """

    def close(self) -> None:
        """Close all that is still open."""
