"""What a transport of event streams is: the contract that the event thread relies on.

In:  endpoints and topics.
Out: messages with their sequence numbers, connection changes, and answers to replay requests.

The event thread (kvplug/ingest/event_thread.py) makes, uses and closes all objects of a transport;
only `Transport.check` is called from other threads. No call waits. What cannot be opened raises
TransportError; whatever a source raises, the event thread closes it and opens another one later.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec


class Message(msgspec.Struct, frozen=True, gc=False):
    """What a publisher sent.

    sequence: its number in this incarnation of the publisher, from 0; None if it has none.
    malformed: why it cannot be read, for a message that is none; it has no payload then.
    """

    topic: bytes
    sequence: int | None
    payload: bytes
    malformed: str | None = None


class Connection(Enum):
    """What happened to the connection of a source."""

    OPENED = "opened"
    LOST = "lost"


class ReplayAnswer(Protocol):
    """The answer to one replay request, as it arrives. `is_ended`: all of it was received."""

    is_ended: bool

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when there may be something to receive."""

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived; may set `is_ended`."""

    def close(self) -> None:
        """Give up the rest; safe to call twice."""


class EventSource(Protocol):
    """A subscription to one publisher, or, if it was bound, to all that connect to it."""

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when there may be something to receive.

        They may be edge-triggered: after a wake-up, call `connection_changes` and then `receive`
        until it returns fewer messages than it may.
        """

    def connection_changes(self) -> list[Connection]:
        """What happened since the last call, in order. A bound source has one per publisher."""

    def receive(self, max_messages: int) -> list[Message]:
        """Messages that have arrived, in order."""

    def request_replay(self, first: int) -> ReplayAnswer:
        """Ask for the messages from number `first` on. Only with a replay endpoint."""

    def close(self) -> None:
        """Drop what is queued; safe to call twice."""


class Transport(Protocol):
    """Opens sources. One object serves all endpoints of its schemes (kvplug/transports)."""

    def check(self, endpoint: str) -> None:
        """TransportError if this is no endpoint to connect to. From any thread."""

    def connect(self, endpoint: str, topic: str, replay: str | None) -> EventSource:
        """Subscribe to topics that begin with `topic`; `replay` answers replay requests."""

    def bind(self, endpoint: str, topic: str) -> tuple[EventSource, str]:
        """Let publishers connect; also returns the endpoint with the port that was taken."""

    def close(self) -> None:
        """Close all that is still open."""
