"""What comes over NATS, as the event thread takes it.

In:  nats-py's messages.   Out: Message; the number after which the last one of an answer comes.

A payload of ours has its numbers inside. One of a stock publisher has its own in a header, and -1
there ends an answer.
"""

from __future__ import annotations

from typing import Final

from nats.aio.msg import Msg

from kvplug.errors import TransportError
from kvplug.nats.subjects import PublisherName, publisher_of
from kvplug.protocol import End, ProtocolError, decode, is_ours
from kvplug.topics import PREFIX
from kvplug.transports.base import Message

NUMBER: Final = "Kvplug-Number"
"""Header: the number of a stock payload, in decimal digits; -1 at the end of an answer."""

STREAM_SEQUENCE: Final = "Kvplug-Seq"
"""Header of a beat: where the publisher's last message is in the stream."""

_SCHEME: Final = "nats://"
_END: Final = -1
_MAX_END_BYTES: Final = 64
_MAX_NUMBER_LENGTH: Final = 19
_MAX_TOPICS: Final = 20_000


def publisher_at(endpoint: str) -> PublisherName:
    """Whose endpoint this is; TransportError if it is none."""
    name = PublisherName.parse(endpoint.removeprefix(_SCHEME))
    if not endpoint.startswith(_SCHEME) or name is None:
        raise TransportError(
            f"cannot subscribe to events at {endpoint!r:.200}: expected an endpoint like "
            "nats://WORKER/0, with the percent-encoded name of a worker and a rank"
        )
    return name


def topic_of(publisher: PublisherName) -> str:
    """What the messages of a publisher have for a topic."""
    return f"{PREFIX}{publisher}"


class Topics:
    """of: the topic of a subject's messages; None if nobody wants them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._known: dict[str, bytes | None] = {}

    def of(self, subject: str) -> bytes | None:
        """From memory, most times: a fleet has few."""
        try:
            return self._known[subject]
        except KeyError:
            return self._remember(subject)

    def _remember(self, subject: str) -> bytes | None:
        publisher = publisher_of(subject)
        topic = None if publisher is None else topic_of(publisher)
        is_wanted = topic is not None and topic.startswith(self._prefix)
        found = topic.encode() if topic is not None and is_wanted else None
        if len(self._known) < _MAX_TOPICS:
            self._known[subject] = found
        return found


def message_of(topic: bytes, msg: Msg, *, is_live: bool) -> Message:
    """One that cannot be read is malformed."""
    headers = msg.headers
    if headers is None or NUMBER not in headers:
        return Message(topic, None, msg.data, is_live=is_live)
    number = number_in(headers[NUMBER])
    if number is None or number < 0:
        said = f"cannot read a message: expected a number in {NUMBER}, got {headers[NUMBER]!r:.40}"
        return Message(topic, None, b"", said, is_live=is_live)
    return Message(topic, number, msg.data, is_live=is_live)


def number_in(text: str) -> int | None:
    """Of a header; None if it is none."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_NUMBER_LENGTH):
        return None
    return int(text)


def ends_answer(msg: Msg) -> bool:
    """Whether a message is the last one of an answer."""
    if msg.headers is not None and NUMBER in msg.headers:
        return number_in(msg.headers[NUMBER]) == _END
    if len(msg.data) > _MAX_END_BYTES or not is_ours(msg.data):
        return False
    try:
        return isinstance(decode(msg.data), End)
    except ProtocolError:
        return False


def is_status(msg: Msg) -> bool:
    """Whether the server says something in place of a message, as that nobody is there."""
    return msg.headers is not None and "Status" in msg.headers
