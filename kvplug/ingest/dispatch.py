"""Messages of one source to the followers of the workers whose topic they carry.

In:  messages of many publishers.   Out: each follower gets what its own worker published.

Publishers that connect to a socket of ours are told apart by topic alone (kvplug/topics.py). When
a peer leaves, the transport does not say which one, so every worker may have restarted. One that
goes on with the next number is taken for the same incarnation; the first break in its numbers
starts it over, and is not taken for a mere gap.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from kvplug.errors import ConfigError, TransportError
from kvplug.topics import Topic
from kvplug.transports.base import Message

if TYPE_CHECKING:  # the forwarder has no router
    from kvplug.ingest.follower import Follower

logger = logging.getLogger(__name__)

# Whoever connects can make topics up.
_MAX_UNKNOWN_TOPICS = 100
_MAX_LOGGED_CHARACTERS = 80
_MAX_CACHED_TOPICS = 10_000


class TopicDispatcher:
    """add and remove followers; the event thread feeds it as it feeds a Follower.

    Use it from one thread only.

    Read: num_peers, num_lost (peers that left so far), and `unknown`, the messages that nobody
    takes, by topic ("..." for all beyond the first hundred).
    """

    def __init__(self) -> None:
        self.num_peers = self.num_lost = 0
        self.unknown: Counter[str] = Counter()
        self._followers: dict[Topic, Follower] = {}
        self._by_topic: dict[bytes, Follower] = {}
        self._unfollowed: set[bytes] = set()
        self._suspects: set[Follower] = set()
        self._touched: set[Follower] = set()
        self._is_interrupted = False
        self.can_ask = False
        """Whether publishers can be asked; whoever owns the sockets says so."""

    @property
    def followers(self) -> list[Follower]:
        """Those that were added."""
        return list(self._followers.values())

    def add(self, follower: Follower, topic: Topic) -> None:
        """Hand the topic's messages to this follower; ConfigError if another one has them."""
        taken = [other for other in self._followers if _overlap(topic, other)]
        if taken:
            raise ConfigError(
                f"topic {str(topic)!r} of {follower.rank}: {self._followers[taken[0]].rank} has "
                f"{str(taken[0])!r} already; expected a topic of its own for each worker"
            )
        self._followers[topic] = follower
        self._unfollowed.clear()
        follower.can_replay = self.can_ask
        if self._is_interrupted:
            follower.on_interrupted()

    def topic_of(self, follower: object) -> str:
        """The topic of its messages; TransportError if it was removed."""
        for topic, each in self._followers.items():
            if each is follower:
                return str(topic)
        raise TransportError("cannot ask for a worker that was removed: expected a topic")

    def take_touched(self) -> set[Follower]:
        """Who got something since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    def remove(self, follower: object) -> None:
        """Its messages are unknown from now on."""
        self._followers = {t: f for t, f in self._followers.items() if f is not follower}
        self._by_topic = {t: f for t, f in self._by_topic.items() if f is not follower}
        self._suspects.discard(follower)
        self._touched.discard(follower)

    def receive(self, messages: list[Message]) -> None:
        """Hand each message to the follower that it is for. Never raises."""
        for topic, group in groupby(messages, key=attrgetter("topic")):
            run = list(group)
            follower = self._by_topic.get(topic) or self._find(topic, len(run))
            if follower is not None:
                self.guard(follower, partial(self._deliver, follower, run))

    def tick(self) -> None:
        """Time has passed. Never raises."""
        for follower in self._followers.values():
            self.guard(follower, follower.tick)

    def guard(self, follower: Follower, call: Callable[[], None]) -> None:
        """Call it; a mistake of ours with one worker must not deafen the others."""
        try:
            call()
        except Exception:
            logger.exception("%s: following its events failed, starting over", follower.rank)
            follower.on_disconnected()

    def on_connected(self) -> None:
        """Somebody connected; whether it is a publisher, and of what, is seen when it speaks."""
        self.num_peers += 1

    def on_disconnected(self) -> None:
        """Some peer is gone; with the last one, all publishers are."""
        self.num_peers, self.num_lost = max(0, self.num_peers - 1), self.num_lost + 1
        if self.num_peers:
            self._suspects |= set(self._followers.values())
            return
        self._suspects.clear()
        for follower in self._followers.values():
            follower.on_disconnected()

    def on_all_disconnected(self) -> None:
        """The endpoint itself failed, and with it every connection."""
        self.num_lost, self.num_peers = self.num_lost + self.num_peers, 1
        self.on_disconnected()

    def on_interrupted(self) -> None:
        """No publisher can be heard or asked; what they say is kept for later."""
        self._is_interrupted = True
        for follower in self._followers.values():
            self.guard(follower, follower.on_interrupted)

    def on_resumed(self) -> None:
        """They can, again."""
        self._is_interrupted = False
        for follower in self._followers.values():
            self.guard(follower, follower.on_resumed)

    def _deliver(self, follower: Follower, messages: list[Message]) -> None:
        if self.can_ask:
            self._touched.add(follower)
        if follower in self._suspects:
            for message in messages:
                self._deliver_of_suspect(follower, message)
            return
        if not follower.connected:
            self._connect(follower)
        follower.receive(messages)

    def _connect(self, follower: Follower) -> None:
        if self.can_ask:  # what was said before is kept, and comes or has come
            follower.on_resumed()
        else:
            follower.on_connected()

    def _deliver_of_suspect(self, follower: Follower, message: Message) -> None:
        if follower in self._suspects and _breaks(follower.sequencer.last, message):
            self._suspects.discard(follower)
            follower.on_disconnected()
        if not follower.connected:
            follower.on_connected()
        follower.receive([message])

    def _find(self, name: bytes, num_messages: int) -> Follower | None:
        """Who has this topic; if nobody has, so many messages are counted."""
        text = name.decode(errors="backslashreplace")
        if name in self._unfollowed:
            self._count_unknown(text, num_messages)
            return None
        topic = Topic.parse(text)
        for registered, follower in self._followers.items():
            if topic is not None and registered.matches(topic):
                if len(self._by_topic) < _MAX_CACHED_TOPICS:
                    self._by_topic[name] = follower
                return follower
        if len(self._unfollowed) < _MAX_CACHED_TOPICS:
            self._unfollowed.add(name)
        self._count_unknown(text, num_messages)
        return None

    def _count_unknown(self, text: str, num_messages: int) -> None:
        text = text[:_MAX_LOGGED_CHARACTERS]
        if text not in self.unknown:
            if len(self.unknown) >= _MAX_UNKNOWN_TOPICS:
                text = "..."
            if text not in self.unknown:
                self._name(text)
        self.unknown[text] += num_messages

    def _name(self, text: str) -> None:
        known = ", ".join(repr(str(topic)) for topic in self._followers) or "none"
        logger.warning("events with the unknown topic %r are ignored; known: %s", text, known)


def _overlap(one: Topic, other: Topic) -> bool:
    return one.matches(other) or other.matches(one)


def _breaks(last: int | None, message: Message) -> bool:
    """Whether a numbered message neither follows the last one nor repeats it."""
    if last is None or message.sequence is None:
        return False
    return message.sequence not in (last, last + 1)
