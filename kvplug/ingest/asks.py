"""When a publisher of ours may be asked for events, at which endpoint, and how long that may take.

In:  failures, progress, the time.   Out: an AskRequest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvplug.ingest.answer_order import AnswerOrder, AskRequest
from kvplug.ingest.replay import ReplaySchedule, ReplaySettings
from kvplug.protocol import Ask, encode

# A publisher with ever new lives or gaps gets no more asks than that.
_ASK_EVERY_S: Final = 0.2


class Asks:
    """may_ask, request; goes_on, failed, succeeded, connected."""

    def __init__(self, clock: Callable[[], float], settings: ReplaySettings) -> None:
        self._clock, self._settings = clock, settings
        self._schedule = ReplaySchedule(clock, settings)
        self._num_tries, self._next_s = 0, clock()

    @property
    def is_paused(self) -> bool:
        """Whether asks have failed again and again."""
        return not self._schedule.may_ask

    @property
    def is_due(self) -> bool:
        """Whether the last ask was long enough ago."""
        return self._clock() >= self._next_s

    @property
    def may_ask(self) -> bool:
        """Whether it is time to."""
        return self.is_due and not self.is_paused

    def request(
        self,
        ask: Ask,
        named: str | None,
        *,
        is_configured: bool,
        life: int,
        hello_next: int,
        began_s: float | None,
    ) -> AskRequest:
        """To be sent now. named: an endpoint that the publisher names; is_configured: whether there
        is another one, which is asked in turns; life: which the answer must have; began_s: of the
        first try, None for a check.
        """
        now_s = self._clock()
        is_turn = is_configured and (named is None or self._num_tries % 2 == 0)
        self._next_s = now_s + _ASK_EVERY_S
        return AskRequest(
            payload=encode(ask),
            endpoint=None if is_turn else named,
            began_s=now_s if began_s is None else began_s,
            deadline_s=now_s + self._settings.answer_timeout_s,
            expires_s=now_s + self._settings.max_answer_s,
            is_check=began_s is None,
            order=AnswerOrder(life, ask.next if ask.life else None),
            hello_next=hello_next,
        )

    def goes_on(self, request: AskRequest) -> None:
        """A part of the answer has come."""
        request.deadline_s = self._clock() + self._settings.answer_timeout_s

    def failed(self) -> bool:
        """Whether to try again; otherwise a pause begins."""
        self._num_tries += 1
        return self._schedule.failed()

    def succeeded(self) -> None:
        """The publisher answers."""
        self._num_tries = 0
        self._schedule.progressed()

    def connected(self) -> None:
        """Whatever it was like before, the publisher may be asked."""
        self._schedule.connected()
