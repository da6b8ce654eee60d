"""How far the stream of a fleet was read, across consumers, sources and threads.

In:  where the owner wants it to begin, what was handed over.   Out: applied_seq, counters.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from kvplug.transports.base import Message


class Delivered(NamedTuple):
    """A message of the stream, None if nobody wants it; its sequence in the stream, where it is
    acknowledged, its bytes, and of which consumer it is. A beat has no sequence, and epoch 0.
    """

    message: Message | None
    seq: int = 0
    reply: str = ""
    num_bytes: int = 0
    epoch: int = 0


class StreamReading:
    """How far the stream was read, and what happened; from any thread.

    applied_seq: everything up to here was handed over and applied; num_pending: messages behind
    the last one that came; num_consumers: that were made; num_rewound: times that the stream was
    new or had lost its end; num_held: beats that waited for the stream; num_late: those that waited
    in vain; error: why it is not read now, in a sentence.
    """

    def __init__(self) -> None:
        self.num_pending = self.num_consumers = self.num_rewound = 0
        self.num_held = self.num_late = 0
        self.error: str | None = None
        self.created: str | None = None
        self._lock = Lock()
        self._begin: int | None = None
        self._epoch = 0
        self._taken = self._applied = Delivered(None)

    @property
    def applied_seq(self) -> int:
        """0 if nothing was."""
        return self._applied.seq

    @property
    def applied(self) -> Delivered:
        """The last one; of an epoch, which begins with each consumer."""
        return self._applied

    @property
    def taken_seq(self) -> int:
        """What was handed over; it is applied with the next call of the event thread."""
        return self._taken.seq

    @property
    def may_begin(self) -> bool:
        """Whether the owner has said where."""
        return self._begin is not None

    def start_after(self, seq: int) -> None:
        """Go on behind this message."""
        with self._lock:
            self._begin = seq
            self._move_to(seq)

    def begin_epoch(self, seq: int) -> int:
        """Another consumer delivers, from behind this message; messages of former ones do not
        count any more.
        """
        with self._lock:
            if seq < self._taken.seq:
                self._begin = seq
            self._move_to(seq)
            return self._epoch

    def _move_to(self, seq: int) -> None:
        self._epoch += 1
        self._taken = self._applied = Delivered(None, seq, epoch=self._epoch)

    def take(self, delivered: Delivered) -> None:
        """It is handed over."""
        with self._lock:
            if delivered.epoch == self._epoch and delivered.seq > self._taken.seq:
                self._taken = delivered

    def apply(self) -> None:
        """What was handed over is applied."""
        with self._lock:
            self._applied = self._taken
