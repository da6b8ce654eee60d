"""The process that publishes the KV events of one engine: `python -m kvplug.engines.sender`.

In:  a Start on standard input, the engine's batches on an inlet (sender_messages.py).
Out: a stream on either wire, on sockets or NATS; Reports on standard output.

It does all that takes time, so that nothing of ours competes with the engine for its interpreter:
expands what a recorder noted, hashes, keeps the resident set, answers followers. It outlives its
engine by as long as it takes to send what the engine has said.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import zmq

from kvplug import codec
from kvplug.engines.connector_events import with_labels
from kvplug.engines.event_stream import EventStream
from kvplug.engines.life import QUEUE_FULL, SENDER_LOST, UNDECODABLE
from kvplug.engines.life_stream import LifeStream
from kvplug.engines.numbered_batches import NumberedBatches
from kvplug.engines.publisher import Publisher
from kvplug.engines.sender_messages import (
    NUMBER_BYTES,
    Batch,
    Counters,
    EngineBatch,
    Line,
    Lost,
    Recorder,
    Refused,
    Report,
    Start,
    Where,
    decode,
    encode_report,
    read_start,
)
from kvplug.engines.settings import PublisherVariables, read_variables, without_open_socket
from kvplug.engines.sglang_notes import Expander as SglangExpander
from kvplug.engines.stock_pools import StockPools
from kvplug.engines.vllm_notes import Expander as VllmExpander
from kvplug.errors import KvplugError

# Idle for so long, the counters are told; while there is always something to do, every second.
_QUIET_MS: Final = 50
_COUNTERS_PAUSE_S: Final = 1.0
# What a killed engine has written is in its sockets; nothing new comes after such a pause.
_LAST_WORDS_MS: Final = 200
_PARENT_PAUSE_MS: Final = 1000
_NUMBERS_APART: Final = 2**20
_MAX_LINE: Final = 1000  # characters; a pipe takes 4096 bytes at once or not at all


class Expander(Protocol):
    """What makes stock events of a recorder's notes."""

    def expand(self, items: Sequence[Any]) -> list[Any]:
        """The events of one batch, with stock events among the items as they are."""

    def forget(self) -> None:
        """Batches were lost."""


class NoNotes:
    """An Expander of batches that have stock events only."""

    def expand(self, items: Sequence[Any]) -> list[Any]:
        """They are what they are."""
        return list(items)

    def forget(self) -> None:
        """There is nothing to forget."""


class Reports(logging.Handler):
    """What is said to the engine's process; a line that it does not read is lost."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        os.set_blocking(fd, False)
        self._fd = fd

    def say(self, report: Report) -> None:
        """Does not wait and does not raise."""
        with suppress(OSError):
            os.write(self._fd, encode_report(report))

    def emit(self, record: logging.LogRecord) -> None:
        """One line of the log, short enough for one write."""
        self.say(Line(record.levelno, record.getMessage()[:_MAX_LINE]))


class Sender:
    """run, until the engine is gone."""

    def __init__(self, start: Start, reports: Reports, logger: logging.Logger) -> None:
        variables = read_variables()
        self._reports, self._logger, self._parent = reports, logger, start.parent
        self._dp_rank = start.about.dp_rank
        self._expander: Expander = NoNotes()
        self._has_lost = start.num_lost > 0
        self._pools = StockPools(tells_device=True) if variables.wire == "vllm" else None
        self._inlet_is_named = True
        self._inlet_folder = Path(start.inlet.partition("://")[2]).parent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inlet = self._context.socket(zmq.PULL)
        self._inlet.setsockopt(zmq.RCVHWM, start.config.max_queue_size)
        self._inlet.bind(start.inlet)
        self._publisher = open_publisher(start, variables, logger)
        self._where: Where | None = None
        self._said, self._counters_at = Counters(), 0.0
        self._num_received, self._expected, self._gap_at = 0, start.next_number, -1
        self._has_ended = False
        if start.num_lost:
            self._publisher.lose(start.num_lost, SENDER_LOST)

    def run(self) -> None:
        """Publish what comes; returns when the engine has ended and all of it is sent."""
        poller = zmq.Poller()
        poller.register(self._inlet, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        try:
            while not self._has_ended:
                self._report()
                events = dict(poller.poll(_QUIET_MS if self._owes_counters else _PARENT_PAUSE_MS))
                self._take_all()
                if sys.stdin.fileno() in events:
                    self._hear()
                elif not events and os.getppid() != self._parent:
                    self._take_last_words()
        finally:
            self._close()

    def _report(self) -> None:
        where = Where(self._publisher.endpoint, self._publisher.answers_at)
        if where != self._where:
            self._where = where
            self._reports.say(where)

    @property
    def _owes_counters(self) -> bool:
        return self._num_received != self._said.num_received or self._said != self._counters()

    def _counters(self) -> Counters:
        publisher = self._publisher
        num_applied, following = publisher.position()
        num_dropped = publisher.num_dropped + publisher.num_lost
        failures = dict(publisher.failures)
        return Counters(self._num_received, num_applied, num_dropped, following, failures)

    def _tell_counters(self) -> None:
        self._said, self._counters_at = self._counters(), time.monotonic()
        self._reports.say(self._said)

    def _take_all(self) -> None:
        """All messages that are there."""
        while not self._has_ended:
            try:
                message = self._inlet.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._on_empty_inlet()
                return
            self._take(message)
            if time.monotonic() - self._counters_at > _COUNTERS_PAUSE_S:
                self._tell_counters()

    def _on_empty_inlet(self) -> None:
        # What is missing comes behind all that is here, and no message shows it yet.
        self._note_gap(before=self._gap_at + 1)
        if self._owes_counters:
            self._tell_counters()

    def _take(self, message: bytes) -> None:
        if self._inlet_is_named:
            self._remove_inlet()
        if message == b"\xc0":
            self._has_ended = True
            return
        try:
            self._apply(decode(message))
        except Exception as error:  # noqa: BLE001  # the next message may be fine
            self._count_failure(error)

    def _apply(self, message: Recorder | Lost | Batch) -> None:
        match message:
            case Recorder(context=context):
                self._set_recorder(context)
            case Lost(num_lost=num_lost, reason=reason):
                self._publisher.lose(num_lost, reason)
            case Batch(number=number, content=content):
                self._note_number(number)
                self._publish(content)

    def _set_recorder(self, context: dict[str, Any]) -> None:
        self._expander = expander(context)
        if self._has_lost:
            self._expander.forget()
        if isinstance(self._publisher, LifeStream):
            self._publisher.note(names_extra_keys=context.get("names_extra_keys", False))

    def _note_number(self, number: int) -> None:
        self._note_gap(before=number)
        self._expected = number + 1
        self._num_received += 1

    def _note_gap(self, *, before: int) -> None:
        if self._expected < before:
            self._publisher.lose(before - self._expected, QUEUE_FULL)
            self._has_lost = True
            self._expander.forget()
            self._expected = before

    def _publish(self, batch: EngineBatch) -> None:
        events = with_labels(self._expander.expand(batch.events))
        if self._pools is not None:
            events = self._pools.on_wire(events)
        rank = self._dp_rank if batch.rank is None else batch.rank
        self._publisher.publish(msgspec.msgpack.encode((batch.ts, events, rank)))

    def _count_failure(self, error: Exception) -> None:
        cause = type(error).__name__
        self._publisher.failures[cause] += 1
        if self._publisher.failures[cause] == 1:
            self._logger.warning("kvplug: batches of KV events are lost: %s: %s", cause, error)
        self._publisher.lose(1, UNDECODABLE)

    def _remove_inlet(self) -> None:
        """The engine is connected, so nobody needs the name, not even an engine that is killed."""
        self._inlet_is_named = False
        shutil.rmtree(self._inlet_folder, ignore_errors=True)

    def _hear(self) -> None:
        """What the engine says besides: numbers of lost batches, or by its end that it is gone."""
        said = os.read(sys.stdin.fileno(), 128 * NUMBER_BYTES)
        if said:
            self._gap_at = int.from_bytes(said[-NUMBER_BYTES:], "big")
        else:
            self._take_last_words()

    def _take_last_words(self) -> None:
        self._has_ended = False
        while not self._has_ended and self._inlet.poll(_LAST_WORDS_MS):
            self._take_all()
        self._has_ended = True

    def _close(self) -> None:
        self._remove_inlet()
        self._publisher.shutdown()
        self._tell_counters()
        self._inlet.close(linger=0)
        self._context.term()


def open_publisher(
    start: Start, variables: PublisherVariables, logger: logging.Logger
) -> LifeStream | NumberedBatches:
    """Publish batches of the stock format on the wire that is asked for. Both read them as they
    would be read off the stock wire, so both mean the same.
    """
    if variables.wire == "vllm":
        publisher = _open_stock(start, variables, logger)
        if start.num_lost:  # beyond all numbers that the sender before it can have given
            publisher.num_published = start.next_number + _NUMBERS_APART
        return publisher
    if variables.nats is not None:
        size = start.config.max_queue_size
        return variables.nats.open_stream(start.about, codec.decode, logger, size)
    config = without_open_socket(start.config, variables.keys, logger)
    return EventStream(config, start.about, codec.decode, logger, keys=variables.keys)


def _open_stock(
    start: Start, variables: PublisherVariables, logger: logging.Logger
) -> NumberedBatches:
    if variables.nats is not None:
        return variables.nats.open_batches(
            start.about, bytes, logger,
            max_queue_size=start.config.max_queue_size, buffer_steps=start.config.buffer_steps,
        )  # fmt: skip
    config = without_open_socket(start.config, variables.keys, logger)
    return Publisher(config, start.about.dp_rank, bytes, logger, keys=variables.keys)


def expander(context: dict[str, Any]) -> Expander:
    """Of the recorder that says this of its notes; {}: there is none."""
    match context.get("recorder"):
        case "vllm":
            return VllmExpander(context)
        case "sglang":
            return SglangExpander(context)
        case _:
            return NoNotes()


def main() -> None:
    """Publish for the engine that started this process."""
    # Ctrl-C in a terminal, and what systemd sends to a whole group, are for the engine, whose end
    # is ours.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    reports = Reports(os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logger = logging.getLogger("kvplug.sender")
    logger.addHandler(reports)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as source:
            sender = Sender(read_start(source), reports, logger)
    except (KvplugError, OSError, EOFError) as error:
        reports.say(Refused(str(error)))
        return
    sender.run()


if __name__ == "__main__":
    main()
