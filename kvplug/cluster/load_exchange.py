"""What replicas of a router tell each other of their load, whatever brings the messages.

In:  a router's requests; the messages of its peers.   Out: messages for them; load in the router.

Each change of load is told at once, as late news is worth little; all that is in flight is told
every second, which puts right what was lost. Rows are absolute, so a message that comes late or
twice, by its number, is not needed. Of a peer that is silent for SILENCE_S nothing counts any more.

A router that is cut off from all others still shares the fleet with them: its own load then counts
once for each of them, too, until it is connected again (docs/decisions.md, 140).
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.cluster.load_rows import OWN, LoadRows, now_of
from kvplug.cluster.sync_messages import (
    MAX_MESSAGE_BYTES,
    PREFILLED_TOKENS,
    VERSION,
    AddRequest,
    Bye,
    Free,
    MarkPrefillCompleted,
    Message,
    News,
    RankLoad,
    Rows,
    SentPrompt,
    Update,
    decode,
    encode,
    fill_row,
    hashes_of,
    prompt_of,
    row_bytes,
)
from kvplug.errors import DecodeError
from kvplug.events import Rank
from kvplug.kernels import costing
from kvplug.router.core import Router
from kvplug.router.load import ActiveRequest, LoadListener
from kvplug.router.shared_load import Sent

F64 = npt.NDArray[np.float64]
_T = TypeVar("_T")

logger = logging.getLogger(__name__)

ROWS_EVERY_S: Final = 1.0
SILENCE_S: Final = 3.0
"""As many rows may be lost."""

_MAX_PEERS: Final = 64
_MAX_QUEUE: Final = 2**16
_MAX_SAID: Final = 100
_MAX_PAST_LIVES: Final = 8
# The last of a part may be a long prompt, of 50 KB.
_FULL_BYTES: Final = MAX_MESSAGE_BYTES // 2
_BYTES_OF_LOAD, _BYTES_OF_CHARACTER, _BYTES_OF_PROMPT = 100, 4, 50


class SyncCounts(msgspec.Struct):
    """sent, heard: messages; missed: of peers, lost on the way; late: came after later ones, or
    twice; refused: could not be used; unknown_ranks: loads of ranks that this router does not know;
    unsent: changes or messages that could not be sent; lost_peers: that fell silent; namesakes:
    messages of another router with this one's id.
    """

    sent: int = 0
    heard: int = 0
    missed: int = 0
    late: int = 0
    refused: int = 0
    unknown_ranks: int = 0
    unsent: int = 0
    lost_peers: int = 0
    namesakes: int = 0


@dataclass(slots=True, eq=False)
class Peer:
    """A replica: its place among the rows, its life, the number of its last message, and when that
    came; numbers of the ranks that the parts of its rows have named, None if one is missing.
    """

    place: int
    life: int
    number: int
    heard_s: float
    named: set[int] | None = None
    next_part: int = 0
    past_lives: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_PAST_LIVES))


class LoadExchange(LoadListener):
    """Of one router. news, rows, bye: messages to send; hear: one that came; tick: time goes by.

    Its methods as a listener come in any thread and wait for nothing; all others are of one thread.
    `wake` is called when there is news. `has_newcomer`: somebody has not heard any row of this one.
    """

    def __init__(
        self, router: Router, router_id: str, wake: Callable[[], None], life: int | None = None
    ) -> None:
        self.router_id, self.counts = router_id, SyncCounts()
        self.peers: dict[str, Peer] = {}
        self.num_assumed = 0
        self.has_newcomer = False
        self._router, self._wake = router, wake
        self._life = random.SystemRandom().getrandbits(63) if life is None else life
        self._own_life = encode(self._life)
        self._numbers = count()
        self._rows = LoadRows(router)
        self._changes: deque[tuple[type[Update], ActiveRequest]] = deque()
        self._said: set[str] = set()

    def started(self, request: ActiveRequest) -> None:
        """As LoadListener."""
        self._note(AddRequest, request)

    def prefilled(self, request: ActiveRequest) -> None:
        """As LoadListener."""
        self._note(MarkPrefillCompleted, request)

    def left(self, request: ActiveRequest) -> None:
        """As LoadListener."""
        self._note(Free, request)

    def _note(self, kind: type[Update], request: ActiveRequest) -> None:
        if len(self._changes) >= _MAX_QUEUE:  # a second's row has it
            self.counts.unsent += 1
            return
        self._changes.append((kind, request))
        self._wake()

    def news(self) -> list[bytes]:
        """Of all changes until now. Of several of a rank, the last row, with each prompt."""
        if not self._changes:
            return []
        self._follow()
        last: dict[int, type[Update]] = {}
        added: list[ActiveRequest] = []
        prefilled: set[int] = set()
        while self._changes:
            kind, request = self._changes.popleft()
            number = request.rank_number
            if self._rank(number) is None:
                continue
            last[number] = kind
            if kind is AddRequest:
                added.append(request)
            elif kind is MarkPrefillCompleted:
                self._rows.of(OWN)[number, PREFILLED_TOKENS] += request.new_tokens
                prefilled.add(number)
        numbers = [*last]
        own, now_ms = self._rows.show(numbers), 1e3 * self._router.clock()
        self._restart(prefilled, now_ms)
        self._assume(numbers)
        loads = {number: self._load(number, own[number], now_ms) for number in numbers}
        updates: list[Update] = [
            AddRequest(loads[request.rank_number], self._prompt(request)) for request in added
        ]
        for number in last.keys() - {request.rank_number for request in added}:
            load, is_over = loads[number], last[number] is Free
            updates.append(Free(load) if is_over else MarkPrefillCompleted(load))
        return [
            encode(News(VERSION, self._life, next(self._numbers), part))
            for part in _parts(updates, _size_of_update)
        ]

    def rows(self) -> list[bytes]:
        """Of all that is in flight, for newcomers, too."""
        self.has_newcomer = False
        self._follow()
        own, now_ms = self._rows.show(self._rows.numbers), 1e3 * self._router.clock()
        busy = np.flatnonzero(own[:, costing.NUM_RUNNING] > 0.5).tolist()
        loads = [self._load(n, own[n], now_ms) for n in busy if self._rank(n) is not None]
        parts = [*_parts(loads, _size)] or [[]]
        return [
            encode(Rows(VERSION, self._life, next(self._numbers), part, len(parts), each))
            for part, each in enumerate(parts)
        ]

    def bye(self) -> bytes:
        """This router stops."""
        return encode(Bye(VERSION, self._life, next(self._numbers)))

    def hear(self, router_id: str, payload: bytes) -> None:
        """A message of a router; nothing is raised by what cannot be used."""
        if router_id == self.router_id:
            self._hear_own(payload)
            return
        try:
            message = decode(payload)
        except DecodeError as error:
            self._refuse(router_id, error)
            return
        with self._router.locked():
            self._follow_locked()
            peer = self._peer(router_id, message)
            if peer is not None:
                self.counts.heard += 1
                self._take(router_id, peer, message)

    def tick(self, *, is_connected: bool) -> None:
        """Forget whoever is silent; to be called several times a second."""
        now_s = self._router.clock()
        silent = [name for name, peer in self.peers.items() if now_s - peer.heard_s > SILENCE_S]
        if is_connected and silent:
            with self._router.locked():
                for name in silent:
                    self._forget(name, self.peers[name])
            self.counts.lost_peers += len(silent)
            logger.warning("replica sync: nothing is heard of %s any more", ", ".join(silent))
        self._assume_for(0 if is_connected or len(silent) < len(self.peers) else len(silent))

    def forget_all(self) -> None:
        """The load of the others does not count any more."""
        self._assume_for(0)
        with self._router.locked():
            self._follow_locked()
            for name, peer in [*self.peers.items()]:
                self._forget(name, peer)

    def reconnected(self) -> None:
        """Messages come again: whoever lives is heard within the silence that is allowed."""
        now_s = self._router.clock()
        for peer in self.peers.values():
            peer.heard_s = now_s
        self._assume_for(0)

    def _rank(self, number: int) -> Rank | None:
        ranks = self._rows.ranks
        return ranks[number] if number < len(ranks) else None

    def _load(self, number: int, row: F64, now_ms: float) -> RankLoad:
        rank = self._rows.ranks[number]
        assert rank is not None
        model = self._router.fleet_index.model_of(rank.worker)
        return RankLoad(rank.worker, rank.dp_rank, model, row_bytes(row, now_ms))

    def _prompt(self, request: ActiveRequest) -> SentPrompt:
        rank = self._rows.ranks[request.rank_number]
        assert rank is not None
        block_size = self._router.fleet_index.group_of(rank).block_size
        # Without events, what was sent there is all that is known, and is renewed.
        first = request.depth if self._router.config.follows_events else 0
        hashes = request.sequence_hashes
        return prompt_of(hashes, first, block_size, request.num_coming, request.own_ms)

    def _follow(self) -> None:
        if self._rows.is_behind:
            with self._router.locked():
                self._rows.follow()

    def _follow_locked(self) -> None:
        if self._rows.is_behind:
            self._rows.follow()

    def _restart(self, prefilled: set[int], now_ms: float) -> None:
        """Ranks have computed prompts of this router."""
        if prefilled and self.peers:
            with self._router.locked():
                for number in prefilled:
                    self._rows.restart(number, now_ms)
                self._rows.take(prefilled)

    def _assume(self, numbers: list[int]) -> None:
        if self.num_assumed:
            with self._router.locked():
                self._rows.assume(numbers, self.num_assumed)
                self._rows.take(numbers)

    def _assume_for(self, num_routers: int) -> None:
        """So many routers that cannot be heard send as much as this one."""
        if num_routers == self.num_assumed:
            return
        self.num_assumed = num_routers
        self._follow()
        numbers = self._rows.numbers
        self._rows.show(numbers)
        with self._router.locked():
            for peer in self.peers.values() if num_routers else ():
                self._rows.empty(peer.place, numbers)
            self._rows.assume(numbers, num_routers)
            self._rows.take(numbers)
        if num_routers:
            logger.warning(
                "replica sync: cut off from %d replicas; until they are heard again, the load of "
                "this router counts for them, too", num_routers,
            )  # fmt: skip

    def _hear_own(self, payload: bytes) -> None:
        if self._own_life not in payload[:32]:
            self.counts.namesakes += 1
            self._say(
                "namesake", f"another router calls itself {self.router_id!r}, too: give each an id "
                "of its own, or they do not hear each other",
            )  # fmt: skip

    def _peer(self, router_id: str, message: Message) -> Peer | None:
        """The sender, if the message is a new one."""
        peer, now_s = self.peers.get(router_id), self._router.clock()
        if peer is not None and peer.life == message.life:
            if message.number <= peer.number:
                self.counts.late += 1
                return None
            self.counts.missed += message.number - peer.number - 1
            peer.number, peer.heard_s = message.number, now_s
            return peer
        if peer is not None and message.life in peer.past_lives:
            self.counts.late += 1
            return None
        return self._newcomer(router_id, peer, message)

    def _newcomer(self, router_id: str, before: Peer | None, message: Message) -> Peer | None:
        """The first message of a life."""
        if isinstance(message, Bye):
            return None
        if before is None and len(self.peers) >= _MAX_PEERS:
            self._refuse(router_id, DecodeError(f"expected at most {_MAX_PEERS} replicas"))
            return None
        peer = Peer(self._rows.open(), message.life, message.number, self._router.clock())
        if before is not None:
            peer.past_lives.extend([*before.past_lives, before.life])
            self._forget(router_id, before)
        self.peers[router_id] = peer
        self.has_newcomer = True
        return peer

    def _take(self, router_id: str, peer: Peer, message: Message) -> None:
        match message:
            case News():
                self._take_news(router_id, peer, message.updates)
            case Rows():
                self._take_rows(router_id, peer, message)
            case Bye():
                self._forget(router_id, peer)

    def _take_news(self, router_id: str, peer: Peer, updates: list[Update]) -> None:
        numbers = self._fill(router_id, peer, (update.load for update in updates))
        self._rows.take(numbers)
        prompts = [update for update in updates if isinstance(update, AddRequest)]
        now_s = self._router.clock()
        for update in prompts:
            try:
                self._note_sent(update, now_s)
            except DecodeError as error:
                self._refuse(router_id, error)
        if prompts:
            self._router.shared_load.note_last_request(1e3 * now_s)

    def _note_sent(self, update: AddRequest, now_s: float) -> None:
        number = self._number_of(update.load)
        if number is None:
            return
        rank, prompt = Rank(update.load.worker, update.load.dp_rank), update.prompt
        hashes, expected = hashes_of(prompt)
        if prompt.block_size == self._router.fleet_index.group_of(rank).block_size:
            sent = Sent(rank, hashes, expected, prompt.num_coming, prompt.ttft_ms)
            self._router.shared_load.note_sent(sent, now_s)

    def _take_rows(self, router_id: str, peer: Peer, rows: Rows) -> None:
        numbers = self._fill(router_id, peer, rows.loads)
        if rows.part == 0:
            peer.named, peer.next_part = set(), 0
        if peer.named is not None and rows.part == peer.next_part:
            peer.named |= numbers
            peer.next_part += 1
        else:
            peer.named = None
        if peer.named is not None and peer.next_part == rows.num_parts:
            gone = set(self._rows.busy(peer.place)) - peer.named
            self._rows.empty(peer.place, gone)
            peer.named, numbers = None, numbers | gone
        self._rows.take(numbers)

    def _fill(self, router_id: str, peer: Peer, loads: Iterable[RankLoad]) -> set[int]:
        """Put them into the rows of a peer; the numbers of their ranks."""
        rows, now_s, filled = self._rows.of(peer.place), self._router.clock(), set()
        for load in loads:
            number = self._number_of(load)
            if number is None:
                self.counts.unknown_ranks += 1
                self._say(
                    f"{load.worker}/{load.model}", f"{router_id} sends requests to {load.worker} "
                    f"(model {load.model or 'unknown'}), which this router does not know",
                )  # fmt: skip
                continue
            before = rows[number, PREFILLED_TOKENS]
            try:
                fill_row(load, now_of(peer.place, 1e3 * now_s), rows[number])
            except DecodeError as error:
                self._refuse(router_id, error)
                continue
            filled.add(number)
            if (more := rows[number, PREFILLED_TOKENS] - before) > 0:
                self._rows.restart(number, 1e3 * now_s, peer.place)
                self._router.shared_load.note_prefill(number, more, now_s)
        return filled

    def _number_of(self, load: RankLoad) -> int | None:
        """Of the rank here; None for one that is unknown, or serves another model."""
        fleet, rank = self._router.fleet_index, Rank(load.worker, load.dp_rank)
        if rank not in fleet.numbers:
            return None
        model = fleet.model_of(load.worker)
        is_same = not model or not load.model or model == load.model
        return fleet.numbers.number_of(rank) if is_same else None

    def _forget(self, router_id: str, peer: Peer) -> None:
        """What it has sent does not count any more. The lock is held."""
        busy = self._rows.busy(peer.place)
        self._rows.close(peer.place)
        self._rows.take(busy)
        del self.peers[router_id]

    def _refuse(self, router_id: str, error: DecodeError) -> None:
        self.counts.refused += 1
        self._say(f"refused {router_id}", f"a message of {router_id} is refused: {error}")

    def _say(self, key: str, what: str) -> None:
        """Once for each key."""
        if key not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(key)
            logger.warning("replica sync: %s", what)


def _size(load: RankLoad) -> int:
    """In bytes, at most."""
    num_characters = len(load.worker) + len(load.model)
    return _BYTES_OF_LOAD + _BYTES_OF_CHARACTER * num_characters


def _size_of_update(update: Update) -> int:
    size = _size(update.load)
    if isinstance(update, AddRequest):
        size += _BYTES_OF_PROMPT + len(update.prompt.chunks) + len(update.prompt.expected)
    return size


def _parts(items: Iterable[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """As few as fit into a message each."""
    part: list[_T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if part and size + more > _FULL_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += more
    if part:
        yield part
