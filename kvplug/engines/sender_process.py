"""The engine's end of its sender process (kvplug/engines/sender.py).

In:  batches of events on the engine's thread, with a recorder's notes among them.
Out: messages on the sender's inlet; its lines in the engine's log; its counters.

`publish` encodes a batch and hands it to libzmq, whose own thread carries it over: no thread of
ours competes with the engine for its interpreter. One waits for what the sender reports, and starts
another one if it ends. What the engine holds is unknown then, until its cache is emptied.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import zmq

from kvplug.engines.binding import private_folder
from kvplug.engines.sender_messages import (
    NUMBER_BYTES,
    Counters,
    Line,
    Lost,
    Recorder,
    Refused,
    Start,
    Where,
    decode_report,
    to_sender,
    write_start,
)
from kvplug.engines.settings import PublisherConfig
from kvplug.errors import ConfigError
from kvplug.protocol import WorkerHello

START_LIMIT_S: Final = 30.0
"""How long the engine's start waits for the sender's."""

STOP_LIMIT_S: Final = 3.0
"""How long `shutdown` waits for what is queued."""

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 8.0
_STEADY_S: Final = 60.0  # a sender that ran for so long is none that cannot run


class SenderProcess:
    """publish, tell_recorder and lose from the engine's thread; shutdown when it has ended.

    Read: endpoint and answers_at (as they are now), num_published, num_dropped, failures by cause,
    counters (as the sender told them last), pid.
    """

    def __init__(self, config: PublisherConfig, about: WorkerHello, logger: logging.Logger) -> None:
        """ConfigError if the sender cannot publish with these settings."""
        self._config, self._about, self._logger = config, about, logger
        self.num_published = self._num_lost = 0
        self.counters = Counters()
        self._failures: Counter[str] = Counter()
        self._where = Where(config.endpoint, config.replay_endpoint)
        self._recorder: dict[str, Any] = {}
        self._encode = to_sender.encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._refused, self._is_heard = "", threading.Event()
        self._stopping = threading.Event()
        # Of senders that took another's place: appended by one thread, taken by the engine's.
        self._new_sockets: deque[zmq.Socket[bytes]] = deque()
        self._owes_recorder = False
        self._pause_s = _FIRST_PAUSE_S
        self._named_end: tuple[int, str] | None = None
        self._process, self._socket = self._start(0)
        self._reader = threading.Thread(target=self._supervise, name="kvplug-sender", daemon=True)
        self._reader.start()
        self._wait_until_heard()

    @property
    def endpoint(self) -> str:
        """Where events are published."""
        return self._where.endpoint

    @property
    def answers_at(self) -> str | None:
        """Where followers ask for what they missed."""
        return self._where.answers_at

    @property
    def num_dropped(self) -> int:
        """Batches that are in no message, so far as is known here."""
        return self._num_lost + self.counters.num_dropped

    @property
    def failures(self) -> Counter[str]:
        """Batches that could not be used, by the name of the error."""
        return self._failures + Counter(self.counters.failures)

    @property
    def pid(self) -> int:
        """Of the sender."""
        return self._process.pid

    def publish(self, batch: object) -> None:
        """Hand over an engine's batch: [ts, events, rank]. Does not wait and does not raise."""
        number = self.num_published
        self.num_published = number + 1
        try:
            if self._new_sockets:
                self._change_socket()
            if self._owes_recorder:
                self._socket.send(self._encode(Recorder(self._recorder)), zmq.NOBLOCK)
                self._owes_recorder = False
            self._socket.send(self._encode((number, batch)), zmq.NOBLOCK)
        except zmq.Again:
            self._drop(number)
        except Exception as error:  # noqa: BLE001  # the next batch may be fine
            self._drop(number)
            if not self._stopping.is_set():
                self._count_failure(error)

    def tell_recorder(self, context: dict[str, Any]) -> None:
        """What the notes mean that further batches contain."""
        self._recorder = context
        self._owes_recorder = not self._say(Recorder(context))

    def lose(self, num_lost: int, reason: str) -> None:
        """The engine no longer knows what it holds."""
        if not self._say(Lost(num_lost, reason)):
            # A number that no batch has says so as well.
            number, self.num_published = self.num_published, self.num_published + 1
            self._drop(number)

    def shutdown(self) -> None:
        """Send what is queued and end; again is harmless."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._say(None)
        with suppress(OSError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_LIMIT_S)
        _close_pipes(self._process)
        self._remove_inlet()
        self._socket.close(linger=0)
        for socket in self._new_sockets:
            socket.close(linger=0)
        self._context.term()

    def _say(self, message: Recorder | Lost | None) -> bool:
        """Whether the sender will hear it."""
        try:
            if self._new_sockets:
                self._change_socket()
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except Exception as error:  # noqa: BLE001  # nothing of ours may raise into an engine
            self._count_failure(error)
            return False
        return True

    def _drop(self, number: int) -> None:
        """Lose a batch: the next one's number shows it, and until then a word besides."""
        self._num_lost += 1
        with suppress(OSError, ValueError):  # it has ended, or has enough of these to read
            os.write(_pipe(self._process.stdin).fileno(), number.to_bytes(NUMBER_BYTES, "big"))

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self._failures[cause] += 1
        if self._failures[cause] == 1:
            self._logger.warning("kvplug: batches of KV events are lost: %s: %s", cause, error)

    # Starting, and starting again.

    def _start(self, num_lost: int) -> tuple[subprocess.Popen[bytes], zmq.Socket[bytes]]:
        self._folder, self._started_s = private_folder(), time.monotonic()
        inlet = f"ipc://{self._folder}/inlet"
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvplug.engines.sender"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
            )
        except Exception:
            self._remove_inlet()
            raise
        start = Start(
            inlet=inlet,
            parent=os.getpid(),
            config=self._config,
            about=self._about,
            next_number=self.num_published,
            num_lost=num_lost,
        )
        with suppress(OSError):  # it has ended already, which its reports will show
            write_start(_pipe(process.stdin), start)
            os.set_blocking(_pipe(process.stdin).fileno(), False)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, self._config.max_queue_size)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(inlet)
        # The first message lets the sender remove the inlet's name.
        socket.send(self._encode(Recorder(self._recorder)), zmq.NOBLOCK)
        return process, socket

    def _remove_inlet(self) -> None:
        """If the sender has not: it does with the first message."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _change_socket(self) -> None:
        """To that of the new sender; here, as a ZMQ socket is its thread's own."""
        while self._new_sockets:
            self._socket.close(linger=0)
            self._socket = self._new_sockets.popleft()
        self._owes_recorder = False  # a new sender begins with it

    def _wait_until_heard(self) -> None:
        if not self._is_heard.wait(START_LIMIT_S):
            self.shutdown()
            raise ConfigError(
                f"the process that sends KV events did not start within {START_LIMIT_S:.0f} s"
            )
        if self._refused:
            self.shutdown()
            raise ConfigError(self._refused)

    def _supervise(self) -> None:
        while True:
            self._read_reports()
            status = self._process.wait()
            self._remove_inlet()
            if self._stopping.is_set() or not self._is_heard.is_set():
                self._refused = self._refused or f"the process that sends KV events ended: {status}"
                self._is_heard.set()
                return
            if time.monotonic() - self._started_s > _STEADY_S:
                self._pause_s, self._named_end = _FIRST_PAUSE_S, None
            self._name_end(status, self._refused)
            self._refused = ""
            if not self._start_again():
                return

    def _name_end(self, status: int, refused: str) -> None:
        """Once, however often a sender that cannot run is started again."""
        if self._named_end != (status, refused):
            self._named_end = status, refused
            self._logger.warning(
                "kvplug: the process that sends KV events ended (status %d) and is started again. "
                "Followers are exact again when the engine's cache is emptied%s",
                status,
                f": {refused}" if refused else "",
            )

    def _start_again(self) -> bool:
        """Whether there is a new sender; no only if there is to be none."""
        _close_pipes(self._process)
        self._num_lost, self.counters = self.num_dropped + 1, Counters()
        while not self._stopping.wait(self._pause_s):
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            try:
                self._process, socket = self._start(1)
                self._new_sockets.append(socket)
            except Exception as error:  # noqa: BLE001  # no memory, no room: it may pass
                self._count_failure(error)
            else:
                if self._stopping.is_set():
                    self._process.kill()
                return True
        return False

    def _read_reports(self) -> None:
        for line in _pipe(self._process.stdout):
            try:
                self._hear(line)
            except msgspec.MsgspecError as error:
                self._count_failure(error)

    def _hear(self, line: bytes) -> None:
        match decode_report(line):
            case Where() as where:
                self._where = where
                self._is_heard.set()
            case Counters() as counters:
                self.counters = counters
            case Line(level=level, text=text):
                self._logger.log(level, "%s", text)
            case Refused(text=text):
                self._refused = text


def _environment() -> dict[str, str]:
    """This process's, with modules found where they are found here, and one thread per library."""
    package = str(Path(__file__).parents[2])
    path = [package, *(each for each in sys.path if each and each != package)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            _pipe(pipe).close()
