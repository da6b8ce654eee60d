"""One follower's requests to its publisher, and the answers as they arrive.

In:  the request that the follower wants; a source that can ask.
Out: the answer's messages, handed to the follower; descriptors to poll meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from kvplug.errors import TransportError
from kvplug.events import Rank
from kvplug.ingest.replay import Request
from kvplug.transports.base import Message, ReplayAnswer

logger = logging.getLogger(__name__)


class Asker(Protocol):
    """Who may want some of a publisher's messages again: a Follower."""

    rank: Rank

    @property
    def replay_request(self) -> Request | None:
        """What the publisher is to be asked for; another object is another request."""

    def replayed(self, messages: list[Message]) -> None:
        """A part of the answer."""

    def replay_ended(self) -> None:
        """The answer is complete."""


class OpenRequest:
    """serve, close. `opened` and `closed` are told of each answer, to poll it."""

    def __init__(
        self,
        follower: Asker,
        ask: Callable[[Request], ReplayAnswer],
        opened: Callable[[ReplayAnswer], None],
        closed: Callable[[ReplayAnswer], None],
    ) -> None:
        """`ask`: TransportError if nobody can be asked; the request then ends at its deadline, as
        without an answer.
        """
        self._follower, self._ask, self._opened, self._closed = follower, ask, opened, closed
        self._request: Request | None = None
        self._answer: ReplayAnswer | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is waited for."""
        return self._request is not None

    def serve(self, max_messages: int) -> bool:
        """Ask for what the follower wants, if it is not asked for yet; hand over what came, at most
        so many messages. Whether there may be more at once.
        """
        follower = self._follower
        request = follower.replay_request
        if request is not self._request:
            self.close()
            self._begin(request)
        answer = self._answer
        if request is None or answer is None:
            return False
        messages = answer.receive(max_messages)
        follower.replayed(messages)
        is_behind = len(messages) == max_messages
        if answer.is_ended and follower.replay_request is request:
            follower.replay_ended()
            is_behind |= follower.replay_request is not None
        return is_behind

    def close(self) -> None:
        """Give up the rest of the answer; again is harmless."""
        answer, self._request, self._answer = self._answer, None, None
        if answer is not None:
            self._closed(answer)

    def _begin(self, request: Request | None) -> None:
        self._request = request
        if request is None:
            return
        try:
            self._answer = self._ask(request)
        except TransportError as error:
            logger.warning("%s: %s", self._follower.rank, error)
        else:
            self._opened(self._answer)
