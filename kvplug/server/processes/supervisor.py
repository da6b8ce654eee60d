"""Supervisor: starts the processes of one router, starts again what dies, ends all of them.

In:  a configuration.   Out: the exit code, once all have ended.

The processes are forks of this one, which has compiled the kernels and bound the port, and does
nothing else: a process that dies is replaced within a tenth of a second. All accept from one
listening socket, so that no connection is lost with one of them. What a dead reader was busy with
is forgotten; a dead writer leaves its arrays, which readers go on with if they are whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from kvplug.errors import KvplugError
from kvplug.http_service import listening_on, url_of
from kvplug.server.config import ServerConfig
from kvplug.server.processes.reader import run_reader
from kvplug.server.processes.writer import run_writer
from kvplug.server.proxy.listening import BACKLOG
from kvplug.shared.folder import OwnedFolder
from kvplug.shared.peers import Place, forget_process, make_files
from kvplug.shared.publishing import abandon

logger = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
# A process that dies soon after its start waits before the next one, longer each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONG_LIFE_S = 0.5, 30.0, 60.0
_END_LIMIT_S: Final = 5.0  # beyond the grace that requests have


@dataclass(slots=True)
class Child:
    """One process: what it runs, its id while it lives; when it is due to start again."""

    name: str
    run: Callable[[Callable[[], None]], None]
    place: Place | None = None
    pid: int | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    pause_s: float = 0.0
    is_ready: bool = False
    was_ready: bool = False
    causes: set[str] = field(default_factory=set)


class Supervisor:
    """run() until SIGINT or SIGTERM."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._ready_at, self._ready_by = os.pipe()
        # Its end tells the processes that this one is gone.
        self._alive_at, self._alive_by = os.pipe()
        self._woken_at, self._woken_by = os.pipe()
        for descriptor in (self._ready_at, self._woken_at, self._woken_by):
            os.set_blocking(descriptor, False)
        self._num_stops = 0
        self._is_listening = False

    def run(self) -> int:
        """Serve; returns the exit code."""
        self._folder = OwnedFolder()
        try:
            make_files(self._folder, self._config.processes)
            self._socket = _bound(self._config)
            self._children = list(self._make_children())
            with self._signals_noted():
                return self._supervise()
        finally:
            self._folder.close()

    def _make_children(self) -> Iterator[Child]:
        config, folder = self._config, self._folder

        def write(ready: Callable[[], None]) -> None:
            run_writer(self._config_of_writer(), folder, self._alive_at, ready)

        yield Child("writer", write)
        for number in range(config.processes):
            place = Place(number, config.processes)

            def run(ready: Callable[[], None], place: Place = place) -> None:
                run_reader(config, folder, place, self._socket, self._alive_at, ready)

            yield Child(f"reader{number}", run, place)

    def _config_of_writer(self) -> ServerConfig:
        """Each is the same router among others, and only the first one resets their state."""
        cluster = self._config.cluster
        if cluster.nats is None:
            return self._config
        router_id = cluster.id_at(self._socket.getsockname()[1])
        resets = cluster.router_reset_states and not self._children[0].was_ready
        cluster = replace(cluster, router_id=router_id, router_reset_states=resets)
        return replace(self._config, cluster=cluster)

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        signal.set_wakeup_fd(self._woken_by, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._num_stops += 1

    def _supervise(self) -> int:
        code = 0
        while not self._num_stops:
            for child in self._children:
                if child.pid is None and time.monotonic() >= child.due_s:
                    self._start(child)
            self._wait(min((c.due_s for c in self._children if c.pid is None), default=None))
            self._note_ready()
            for child in self._reaped():
                if not child.was_ready:  # it could not even start: its log says why
                    return self._end(1)
                self._note_death(child)
        return self._end(code)

    def _start(self, child: Child) -> None:
        child.is_ready, child.started_s = False, time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os._exit(self._run_child(child))
        child.pid = pid

    def _run_child(self, child: Child) -> int:
        """In the new process; returns its exit code."""
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.close(self._alive_by)
            child.run(lambda: _write(self._ready_by, child.name))
        except KvplugError as error:
            logger.error("%s: %s", child.name, error)  # noqa: TRY400 - one sentence says it
            return 1
        except SystemExit as error:
            return int(error.code or 0) if isinstance(error.code, int | None) else 1
        except BaseException:
            logger.exception("%s failed", child.name)
            return 1
        return 0

    def _wait(self, due_s: float | None) -> None:
        """For a signal, a process that is ready, or the time when one is due."""
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        ready, _, _ = select.select([self._woken_at, self._ready_at], [], [], timeout_s)
        if self._woken_at in ready:
            _read(self._woken_at)

    def _note_ready(self) -> None:
        names = _read(self._ready_at).decode().split()
        for child in self._children:
            if child.name in names:
                child.is_ready = child.was_ready = True
                if child.started_s:
                    logger.info("%s (process %s) is ready", child.name, child.pid)
        if not self._is_listening and all(child.is_ready for child in self._children):
            self._is_listening = True
            host, port = self._socket.getsockname()[:2]
            logger.info(
                "listening on %s, %d processes, mode %s, %d workers",
                url_of(host, port),
                self._config.processes,
                self._config.router.mode,
                len(self._config.workers),
            )

    def _reaped(self) -> Iterator[Child]:
        """The processes that have ended."""
        for child in self._children:
            if child.pid is not None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(status)
                    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
                    self._forget(child)
                    self._report(child, cause)
                    child.pid = None
                    yield child

    def _forget(self, child: Child) -> None:
        """Nothing of a dead process stays with the others."""
        if child.place is not None:
            forget_process(self._folder, child.place)
        else:
            abandon(self._folder)

    def _report(self, child: Child, cause: str) -> None:
        """Each cause once: a process that cannot live would fill the log."""
        if not self._num_stops and cause not in child.causes:
            logger.error("%s (process %s) ended by %s", child.name, child.pid, cause)
        child.causes.add(cause)

    def _note_death(self, child: Child) -> None:
        now_s = time.monotonic()
        if now_s - child.started_s >= _LONG_LIFE_S:
            child.pause_s = 0.0
            child.causes.clear()
        child.due_s = now_s + child.pause_s
        child.pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * child.pause_s))

    def _end(self, code: int) -> int:
        """The readers first: the writer knows until the end what they need."""
        if self._is_listening:
            logger.info("stopping, requests in flight have %g s", self._config.grace_s)
        self._socket.close()
        writer, readers = self._children[0], self._children[1:]
        for children in (readers, [writer]):
            self._signal(children, signal.SIGTERM)
            self._await_end(children)
            self._signal(children, signal.SIGKILL)
            self._await_end(children)
        return code if self._num_stops < 2 else 1  # as of one process

    def _signal(self, children: list[Child], number: signal.Signals) -> None:
        for child in children:
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def _await_end(self, children: list[Child]) -> None:
        """Until they have ended, the time is over, or a second signal came."""
        num_stops = max(1, self._num_stops)
        limit_s = time.monotonic() + self._config.grace_s + _END_LIMIT_S
        while time.monotonic() < limit_s and self._num_stops <= num_stops:
            list(self._reaped())
            if all(child.pid is None for child in children):
                return
            self._wait(limit_s)
            self._note_ready()


def _bound(config: ServerConfig) -> socket.socket:
    """A listening socket; TransportError if the address cannot be had."""
    with listening_on(config.host, config.port):
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        bound = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
        bound.setblocking(False)
        return bound


def _write(descriptor: int, name: str) -> None:
    os.write(descriptor, f"{name}\n".encode())


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""
