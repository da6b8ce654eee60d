"""Ctrl-C and SIGTERM: both end the demo in the same way.

In:  SIGINT or SIGTERM at any moment.
Out: KeyboardInterrupt where the program is, so that everything it started is stopped, and the
exit code that a shell expects.

Importing this needs nothing but the standard library: signals are taken care of before the slow
imports begin.
"""

import signal
from types import FrameType

SHELL_OFFSET = 128
# Python drops an exception that is raised in a callback of a weak reference, as imports have them.
AGAIN_S = 2.0


class StopSignals:
    """Which signal asked for the end; the first one counts."""

    def __init__(self) -> None:
        self._signum = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM."""
        return SHELL_OFFSET + self._signum

    @property
    def name(self) -> str:
        """What to tell the user."""
        return self._signum.name

    def listen(self) -> None:
        """Turn both signals into KeyboardInterrupt."""
        # Set although it is the default: a shell starts background jobs with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGALRM, self._on_sigterm)

    def ignore(self) -> None:
        """While things are stopped, which takes seconds at most, impatience does not help."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signal.SIGTERM
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        # The handler of the moment: asyncio puts one in place that cancels the running task.
        on_sigint = signal.getsignal(signal.SIGINT)
        if callable(on_sigint):
            on_sigint(signal.SIGINT, frame)
