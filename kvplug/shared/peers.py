"""What the processes of one router tell each other: their load, and what they have sent where.

In:  what this process has sent to ranks.   Out: what the others have.

Each process writes its own rows and its own ring, and reads those of all others: a decision sums
the rows, so that N processes decide by one load. A row that is read while it is written mixes two
moments that are a microsecond apart, and is read again with the next decision. What was sent where
(prompts, by their hashes) is told besides, as a rank is expected to hold it in a moment, and
to lose what it evicts for it. Whoever is too slow for a ring misses some of that, and counts it.

A process that dies leaves its rows to its supervisor, which zeroes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.kernels import versioned
from kvplug.kernels.peer_load import ROW_WIDTH
from kvplug.kernels.versioned import HEAD, RING_HEADER
from kvplug.router.load import ActiveRequest
from kvplug.router.shared_load import Sent
from kvplug.shared import layout
from kvplug.shared.folder import SharedFolder
from kvplug.shared.layout import LINE_WIDTH, NEWS_WORDS, NUM_SLOTS

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_NUM_CHANGES, _LAST_MS = 0, 1  # words of a line
# Words of a message: how many there are with its hashes; the slot of the rank; leading blocks that
# the rank has, blocks that come to it, time to first token in ms (float64).
_LENGTH, _SLOT, _DEPTH, _COMING, _OWN_MS, _HEAD_WIDTH = range(6)
_LONGEST: Final = NEWS_WORDS // 8


class Place(msgspec.Struct, frozen=True):
    """Which of how many processes."""

    number: int
    num_processes: int


class Peers:
    """show by `own_rows` and note_change, tell; have_changed, rows, last_ms, news. Not thread-safe.

    num_missed: how often news of others were written over before they were read.
    """

    def __init__(self, folder: SharedFolder, place: Place) -> None:
        self.place, num = place, place.num_processes
        self._names = folder.open(layout.NAMES, writes=True)
        words = folder.open(layout.LOAD, writes=True)
        self.rows: F64 = words[: layout.rows_at(num)].view(np.float64)
        first = layout.rows_at(place.number)
        self.own_rows: F64 = self.rows[first : first + layout.ROWS_WORDS]
        lines = words[layout.rows_at(num) :].reshape(num, LINE_WIDTH)
        self._times: F64 = lines.view(np.float64)[:, _LAST_MS]
        self._others = [n for n in range(num) if n != place.number]
        # Single words are read in a third of the time by a memoryview.
        self._own_line = lines[place.number]
        self._their_lines = [lines[n].data for n in self._others]
        self._seen = -1
        self._ring = folder.open(layout.news_name(place.number), writes=True)
        self._rings = {n: folder.open(layout.news_name(n)) for n in self._others}
        self._places = {n: int(ring[HEAD]) for n, ring in self._rings.items()}
        self._heads = {n: ring[: HEAD + 1].data for n, ring in self._rings.items()}
        self._first: U64 = np.zeros(_HEAD_WIDTH, dtype=np.uint64)
        self._first_ms = self._first[_OWN_MS:].view(np.float64)
        self._words: U64 = np.zeros(_LONGEST, dtype=np.uint64)
        self._slots: dict[Rank, int] = {}
        self._ranks: dict[int, Rank] = {}
        self.num_missed = 0

    def slots_of(self, ranks: list[Rank | None]) -> I64:
        """int64[ranks]: the slot of each, which is the same in all processes; NO_SLOT where there
        is no rank, or no room.
        """
        slots = [versioned.NO_SLOT if rank is None else self._slot_of(rank) for rank in ranks]
        return np.array(slots, dtype=np.int64)

    def _slot_of(self, rank: Rank) -> int:
        if rank not in self._slots:
            name = f"{rank.worker}#{rank.dp_rank}".encode()
            word = int.from_bytes(blake2b(name, digest_size=8).digest(), "little") | 1
            slot = self._slots[rank] = int(versioned.claim(self._names, np.uint64(word)))
            self._ranks[slot] = rank
        return self._slots[rank]

    def leave(self, slots: I64) -> None:
        """These ranks are not in the fleet of this process any more."""
        for slot in slots[slots >= 0].tolist():
            self.own_rows[ROW_WIDTH * slot : ROW_WIDTH * (slot + 1)] = 0.0
            self._own_line[_NUM_CHANGES] += np.uint64(1)

    def note_change(self, last_ms: float) -> None:
        """`own_rows` have changed; when this process routed a request last."""
        self._times[self.place.number] = last_ms
        self._own_line[_NUM_CHANGES] += np.uint64(1)

    def have_changed(self) -> bool:
        """Whether the load of others has, since it was asked last."""
        changes = sum(line[_NUM_CHANGES] for line in self._their_lines)
        if changes == self._seen:
            return False
        self._seen = changes
        return True

    @property
    def last_ms(self) -> float:
        """When any other process routed a request last; 0 if none has."""
        return float(self._times[self._others].max(initial=0.0))

    def tell(self, rank: Rank, request: ActiveRequest) -> None:
        """This process has sent a prompt to a rank."""
        hashes = request.sequence_hashes[: _LONGEST - _HEAD_WIDTH]
        length, slot = _HEAD_WIDTH + len(hashes), max(0, self._slot_of(rank))
        self._first[:_OWN_MS] = length, slot, request.depth, round(request.num_coming)
        self._first_ms[0] = request.own_ms
        versioned.push(self._ring, self._first, hashes)

    def news(self) -> Iterator[Sent]:
        """What the others have sent since, to ranks that this process knows."""
        for number, ring in self._rings.items():
            while self._places[number] != (head := self._heads[number][HEAD]):
                place = np.uint64(self._places[number])
                num_words = int(versioned.pull(ring, place, self._words))
                if num_words == versioned.WRITTEN_OVER:
                    self.num_missed += 1
                    self._places[number] = head
                    continue
                yield from self._messages(number, num_words)

    def _messages(self, number: int, num_words: int) -> Iterator[Sent]:
        at, words = 0, self._words
        while at < num_words:
            length = int(words[at + _LENGTH])
            if at + length > num_words:
                break  # the rest of it comes with the next pull
            message = words[at : at + length]
            rank = self._ranks.get(int(message[_SLOT]))
            if rank is not None:
                own_ms = float(message[_OWN_MS : _OWN_MS + 1].view(np.float64)[0])
                hashes = message[_HEAD_WIDTH:].copy()
                expected = hashes[int(message[_DEPTH]) :]
                yield Sent(rank, hashes, expected, float(message[_COMING]), own_ms)
            at += length
        self._places[number] += at


def make_files(folder: SharedFolder, num_processes: int) -> None:
    """The files that processes share, before the first of them starts."""
    folder.create(layout.CONTROL, versioned.CONTROL_WIDTH)
    folder.create(layout.NAMES, NUM_SLOTS)
    folder.create(layout.LOAD, layout.load_words(num_processes))
    for number in range(num_processes):
        folder.create(layout.news_name(number), RING_HEADER + NEWS_WORDS)


def forget_process(folder: SharedFolder, place: Place) -> None:
    """A process has died: nothing is busy because of it any more."""
    words = folder.open(layout.LOAD, writes=True)
    first, line = layout.rows_at(place.number), layout.line_at(place.number, place.num_processes)
    words[first : first + layout.ROWS_WORDS] = 0
    words[line + _NUM_CHANGES] += np.uint64(1)
