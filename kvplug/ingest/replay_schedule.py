"""When an engine may be asked for a replay, and when it is asked without a known need.

In:  failures, progress, and what was heard last.   Out: yes or no, at the time of asking.
"""

from __future__ import annotations

from collections.abc import Callable

from kvplug.ingest.repair_settings import RepairSettings


class ReplaySchedule:
    """may_ask, is_check_due; progressed, failed, heard, checked."""

    def __init__(self, clock: Callable[[], float], settings: RepairSettings) -> None:
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
        """A message, or all of a replay: ask once more after a short silence."""
        self._check_at_s = self._clock() + self._settings.confirm_after_s

    def checked(self) -> None:
        """There was no more, or no answer."""
        self._check_at_s = self._clock() + self._settings.check_every_s

    def progressed(self) -> None:
        """The engine answers, or is connected anew."""
        self._num_tries = 0

    def failed(self) -> bool:
        """Whether to try again; otherwise a pause begins."""
        self._num_tries += 1
        if self._num_tries < self._settings.max_tries:
            return True
        self._num_tries = 0
        self._paused_until_s = self._clock() + self._settings.pause_s
        return False
