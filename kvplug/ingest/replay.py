"""What a publisher is asked to send again, and when it may be asked.

In:  failures, progress, what was heard last, and the time.
Out: a Request for whoever owns the sockets; whether a request is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Times in seconds.

    answer_timeout_s: silence after which a replay has failed; max_answer_s: how long an answer may
    take in all; max_tries: failures in a row before a pause of pause_s; lost_after_s: an
    interrupted stream loses its blocks after that; max_pending_bytes: of live messages that wait
    for a replay, more are asked for later.
    check_after_s: a loss shows only with the next message, and a publisher learns of a
    subscription some time after the connection; so after a silence of this length the engine is
    asked once whether there is more, and then every check_every_s while it stays silent.
    """

    answer_timeout_s: float = 5.0
    max_answer_s: float = 120.0
    max_tries: int = 3
    pause_s: float = 30.0
    lost_after_s: float = 10.0
    max_pending_bytes: int = 64 * 2**20
    check_after_s: float = 1.0
    check_every_s: float = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """`payload` is to be sent to `endpoint`, or, for None, to the replay endpoint of the stream.
    Another object is another request.

    began_s: when the first try was; deadline_s: of the next message of the answer; expires_s: of
    all of it. is_check: live messages go on meanwhile.
    """

    payload: bytes
    endpoint: str | None = None
    began_s: float
    deadline_s: float
    expires_s: float
    is_check: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class ReplayRequest(Request):
    """A stock publisher is asked for the messages from number `first` on.

    asks_everything: `first` is 0, and the answer replaces what is known; otherwise `first` is the
    last message that was applied, and proves that it is the same incarnation.
    is_check: nothing is known to be missing.
    num_pending: messages that waited when it was asked. The answer is newer than they are.
    is_proved: a message of the answer was accepted as this publisher's; is_confirmed: that message
    had come live.
    """

    first: int
    asks_everything: bool
    num_pending: int = 0
    is_proved: bool = False
    is_confirmed: bool = False


class ReplaySchedule:
    """may_ask, is_check_due; connected, progressed, failed, heard, checked, paused."""

    def __init__(self, clock: Callable[[], float], settings: ReplaySettings) -> None:
        self._clock, self._settings = clock, settings
        self._num_tries = 0
        self._paused_until_s = self._check_at_s = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether no pause is on."""
        return self._clock() >= self._paused_until_s

    @property
    def is_check_due(self) -> bool:
        """Whether the stream has been silent for long enough to ask whether there is more."""
        return self._clock() >= self._check_at_s

    def heard(self) -> None:
        """A message, or all of a replay: check once more after a short silence."""
        self._check_at_s = self._clock() + self._settings.check_after_s

    def checked(self) -> None:
        """There was no more, or no answer."""
        self._check_at_s = self._clock() + self._settings.check_every_s

    def connected(self) -> None:
        """Whatever it was like before, it may be asked."""
        self._num_tries, self._paused_until_s = 0, 0.0

    def progressed(self) -> None:
        """The engine answers."""
        self._num_tries = 0

    def failed(self) -> bool:
        """Whether to try again; otherwise a pause begins."""
        self._num_tries += 1
        if self._num_tries < self._settings.max_tries:
            return True
        self.paused()
        return False

    def paused(self) -> None:
        """Ask for nothing for a while."""
        self._num_tries = 0
        self._paused_until_s = self._clock() + self._settings.pause_s
