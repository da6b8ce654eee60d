"""A command with a process group and a log of its own.

In:  a command line, its environment, a log file.
Out: processes that are started, waited for, stopped and killed as a whole, whatever they started
themselves, and that are gone when this process is gone, however it went. Their temporary files (of
engines: sockets, mostly) are in a folder that goes with them.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.launch import lifeline
from examples.launch.errors import LaunchError

POLL_S = 0.05
LOG_TAIL_LINES = 30


class ChildProcess:
    """One command; it can be started again once it has ended."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = list(command)
        self._env = dict(os.environ if env is None else env)
        self._leader: subprocess.Popen[bytes] | None = None
        self._last_status: int | None = None

    def start(self) -> None:
        """Start the command; its output is added to the log."""
        if self.members():
            raise LaunchError(f"{self.name} is already running")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._scratch = tempfile.mkdtemp(prefix="kvplug-")
            self._leader = subprocess.Popen(
                [sys.executable, "-I", "-S", lifeline.__file__, self._scratch, *self._command],
                stdin=subprocess.PIPE,  # the lifeline: it breaks when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._env, "TMPDIR": self._scratch},
                start_new_session=True,
            )

    @property
    def exit_status(self) -> int | None:
        """How the command ended: None while it runs, and before it was ever started."""
        return self._last_status if self._leader is None else self._leader.poll()

    def members(self) -> list[int]:
        """The ids of the group's processes that still run."""
        return [] if self._leader is None else group_members(self._leader.pid)

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        """Wait for the condition; raise if the command ends first or the time is up."""

        def ended_or_met() -> bool:
            return self.exit_status is not None or condition()

        if not poll_until(ended_or_met, timeout_s=timeout_s):
            raise self._failure(f"{self.name} took longer than {timeout_s:.0f} s to {what}")
        if self.exit_status is not None:
            status = self.exit_status
            raise self._failure(f"{self.name} ended with status {status} before it could {what}")

    def run(self, *, timeout_s: float) -> None:
        """Start the command and wait for its end; raise unless it ended with status 0."""
        self.start()
        try:
            if not poll_until(lambda: self.exit_status is not None, timeout_s=timeout_s):
                raise self._failure(f"{self.name} took longer than {timeout_s:.0f} s")
            if self.exit_status != 0:
                raise self._failure(f"{self.name} failed with status {self.exit_status}")
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        self._signal_group(signal.SIGKILL)
        self._reap()

    def ask_to_stop(self) -> None:
        """SIGTERM to the whole group, without waiting for what comes of it."""
        self._signal_group(signal.SIGTERM)

    def stop(self, *, limit_s: float = 10.0) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left of it after limit_s."""
        self.ask_to_stop()
        poll_until(lambda: not self.members(), timeout_s=limit_s)
        self.kill()

    def log_tail(self) -> str:
        """The end of the log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def _signal_group(self, signum: signal.Signals) -> None:
        if self._leader is not None and self.members():
            # The last member may go between the question and the signal.
            try:
                os.killpg(self._leader.pid, signum)
            except ProcessLookupError:
                return

    def _reap(self) -> None:
        if self._leader is None:
            return
        self._last_status = self._leader.wait()
        if not poll_until(lambda: not self.members(), timeout_s=10):
            raise LaunchError(f"{self.name} left processes that cannot be killed: {self.members()}")
        if self._leader.stdin is not None:
            self._leader.stdin.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._leader = None  # the group's id may now become somebody else's: forget it

    def _failure(self, sentence: str) -> LaunchError:
        error = LaunchError(f"{sentence}; its log is {self.log_path}")
        error.add_note(self.log_tail())
        return error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def group_members(group_id: int) -> list[int]:
    """The processes of a group, less the dead ones that only wait to be noticed."""
    # A glob for "*/stat" raises for a process that ends while it asks whether a file exists.
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if _runs_in_group(Path(f"/proc/{pid}/stat"), group_id)]


def _runs_in_group(stat: Path, group_id: int) -> bool:
    try:
        content = stat.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended while we looked
    # The name stands in parentheses and may hold any byte; state, parent and group follow it.
    state, _parent, group = content.rpartition(b")")[2].split()[:3]
    return int(group) == group_id and state not in (b"Z", b"X")


def poll_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """True once the condition holds, False if it does not within timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
