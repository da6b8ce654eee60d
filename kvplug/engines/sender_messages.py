"""What an engine's process and its sender process say to each other.

In:  nothing.
Out: a Start, on the sender's standard input; then messages on its inlet, a ZMQ PULL socket; and
Reports, as lines of JSON on its standard output.

A message on the inlet is msgpack: [number, batch] with the engine's own batch [ts, events, rank];
a map, which is a Recorder or Lost; or nil, the end. Numbers rise by one, so a gap is a loss. Behind
the Start, standard input has numbers of batches that were lost, as no message may follow that shows
it; its end is the engine's.
"""

from __future__ import annotations

from typing import IO, Any, Final

import msgspec
from msgspec import Struct, field

from kvplug.engines.settings import PublisherConfig
from kvplug.protocol import WorkerHello

NUMBER_BYTES: Final = 8


class Start(Struct, frozen=True, kw_only=True):
    """Begin to publish; the first thing that a sender reads.

    parent: the engine's process; next_number: of the first batch; num_lost: batches before it that
    another sender had, so that what they stored is unknown.
    """

    inlet: str
    parent: int
    config: PublisherConfig
    about: WorkerHello
    next_number: int = 0
    num_lost: int = 0


class Recorder(Struct, frozen=True, tag="recorder"):
    """What notes among the events of all further batches mean; {} if there are none."""

    context: dict[str, Any]


class Lost(Struct, frozen=True, tag="lost"):
    """The engine no longer knows what it holds."""

    num_lost: int
    reason: str


class EngineBatch(Struct, array_like=True):
    """A batch as vLLM and SGLang encode it; of its events a recorder's notes are no maps."""

    ts: float
    events: list[Any]
    rank: int | None = None


class Batch(Struct, array_like=True):
    """What is handed over in one call."""

    number: int
    content: EngineBatch


class Where(Struct, frozen=True, tag="where"):
    """Where the sender publishes and answers, now and until it says otherwise."""

    endpoint: str
    answers_at: str | None


class Line(Struct, frozen=True, tag="line"):
    """A line for the engine's log."""

    level: int
    text: str


class Counters(Struct, tag="counters"):
    """What became of the batches: num_applied of num_received are in messages up to `next`."""

    num_received: int = 0
    num_applied: int = 0
    num_dropped: int = 0
    next: int = 0
    failures: dict[str, int] = field(default_factory=dict)


class Refused(Struct, frozen=True, tag="refused"):
    """The sender cannot publish with what it was told, and ends."""

    text: str


Report = Where | Line | Counters | Refused
to_sender: Final = msgspec.msgpack.Encoder()
_START: Final = msgspec.msgpack.Decoder(Start)
_CONTROL: Final = msgspec.msgpack.Decoder(Recorder | Lost)
_REPORT: Final[msgspec.json.Decoder[Report]] = msgspec.json.Decoder(Report)
_BATCH: Final = msgspec.msgpack.Decoder(Batch)


def write_start(to: IO[bytes], start: Start) -> None:
    """Send it, with its length before it, as more may follow."""
    packed = to_sender.encode(start)
    to.write(len(packed).to_bytes(NUMBER_BYTES, "big") + packed)
    to.flush()


def read_start(source: IO[bytes]) -> Start:
    """Wait for it; EOFError without one."""
    length = int.from_bytes(_read(source, NUMBER_BYTES), "big")
    return _START.decode(_read(source, length))


def _read(source: IO[bytes], num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = source.read(num_bytes - len(found))
        if not part:
            raise EOFError("the engine's process ended before it said what to publish")
        found += part
    return found


def decode(message: bytes) -> Recorder | Lost | Batch:
    """One message of the inlet but the end; msgspec.DecodeError if it is none."""
    is_array = message[:1] == b"\x92"
    return _BATCH.decode(message) if is_array else _CONTROL.decode(message)


def encode_report(report: Report) -> bytes:
    """As a line."""
    return msgspec.json.encode(report) + b"\n"


def decode_report(line: bytes) -> Report:
    """msgspec.DecodeError if it is none."""
    return _REPORT.decode(line)
