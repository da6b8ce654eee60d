"""A resident set as packed events: a short history after which an index holds just that.

In:  a Listing.   Out: payloads (kvplug/packed.py), to be applied in order.

    adapters      the LoRA adapter of each seed
    structure     every block once, parents first, where it is; ghosts in a place of their own
    groups        the KV cache groups, and what each has
    pools         CXL states, by transitions
    copies        where a block is more than once
    ghosts go     blocks that only later ones, or their metadata, need

Blocks that follow each other go as one event. Their runs are found in arrays, a million blocks
in 0.2 s.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from kvplug.engines.resident_blocks import (
    DEVICE,
    DISK,
    GROUP,
    HOST,
    I64,
    NO_PARENT,
    Mask,
)
from kvplug.engines.resident_groups import FULL, GroupKind
from kvplug.engines.resident_set import Listing
from kvplug.events import MAMBA, CxlMetadata, CxlState, MoeLabel, Tier
from kvplug.packed import (
    REMOVED,
    STORED,
    VERSION,
    PackedAdapter,
    PackedCopied,
    PackedEvent,
    PackedRemoved,
    PackedStored,
    PackedTransition,
    U64Like,
    as_array,
)
from kvplug.protocol import MAX_EVENTS

MAX_BLOCKS: Final = 4096
"""Of one event: 64 KiB of hashes."""

_WORD: Final = 8
_HEAD_BYTES: Final = 48
_MIN_COPIES: Final = 4  # kvplug/index/lower_tiers.py

Packed = tuple[int, list[object]]
"""An event as it is encoded, with about its length in bytes."""


def packed_parts(listing: Listing, max_bytes: int) -> Iterator[bytes]:
    """Payloads of at most `max_bytes` or so, parents first; none if nothing is held."""
    return payloads_of(_Listed(listing).events(), max_bytes)


def payloads_of(packed: Iterable[Packed], max_bytes: int) -> Iterator[bytes]:
    """Events put together until they are `max_bytes`, or MAX_EVENTS of them."""
    events: list[object] = [VERSION]
    num_bytes = 0
    for length, event in packed:
        is_full = num_bytes + length > max_bytes or len(events) > MAX_EVENTS
        if num_bytes and is_full:
            yield msgspec.msgpack.encode(events)
            events, num_bytes = [VERSION], 0
        events.append(event)
        num_bytes += length
    if num_bytes:
        yield msgspec.msgpack.encode(events)


def packed(event: PackedEvent) -> Packed:
    """An event with its length."""
    if isinstance(event, PackedStored) and _is_plain(event):
        names, hashes = _words(event.engine_hashes), _words(event.hashes)
        head = [STORED, int(event.tier), event.parent, event.seed]
        return _HEAD_BYTES + len(names) + len(hashes), [*head, names, hashes]
    if isinstance(event, PackedRemoved) and not event.group:
        names = _words(event.engine_hashes)
        return _HEAD_BYTES + len(names), [REMOVED, int(event.tier), names]
    blocks = getattr(event, "engine_hashes", ())
    num_words = 2 if isinstance(event, PackedStored) else 1
    details = getattr(event, "cxl", None) or getattr(event, "accessible_workers", None)
    more = len(str(details)) if details else 0
    return 2 * _HEAD_BYTES + more + _WORD * num_words * len(blocks), as_array(event)


def _is_plain(event: PackedStored) -> bool:
    """Whether it has no details; nearly all have none, and to look at each takes microseconds."""
    is_usual = event.group == 0 and (event.attention, event.sliding_window) == FULL
    return is_usual and event.cxl is None and event.moe is None


def _words(numbers: U64Like) -> bytes:
    """As little-endian u64."""
    if isinstance(numbers, np.ndarray):
        return numbers.astype("<u8").tobytes()
    words = array("Q", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class _Listed:
    """events; the arrays of a listing, and what was asked of each block's place."""

    def __init__(self, listing: Listing) -> None:
        self._listing, self._blocks = listing, listing.blocks
        self._num = len(self._blocks.names)
        self._name_bytes = self._blocks.names.astype("<u8").tobytes()
        self._hash_bytes = self._blocks.hashes.astype("<u8").tobytes()
        self._group = listing.main or 0
        self._is_in_cxl = self._which(listing.metadata)

    def events(self) -> Iterator[Packed]:
        """All, in order."""
        for seed, lora_name in self._listing.adapters.items():
            yield packed(PackedAdapter(seed, lora_name))
        yield from self._roles()
        yield from self._offloaded_copies()
        yield from self._structure()
        yield from self._pools()
        yield from self._copies()
        yield from self._ghosts_go()

    # Blocks once, parents first.

    def _structure(self) -> Iterator[Packed]:
        tiers, self._is_lent = self._first_places()
        labels = self._label_numbers()
        names = list(dict.fromkeys(self._listing.labels.values()))
        starts = self._run_starts(tiers, labels)
        bounds = [*starts.tolist(), self._num]
        plain = self._group == 0 and self._scaffold < GROUP
        for first, end in pairwise(bounds):
            tier, label = int(tiers[first]), int(labels[first])
            if plain and not label:
                yield self._plain_run(first, end, tier)
            else:
                yield packed(self._run(first, end, tier, names[label - 1] if label else None))

    def _first_places(self) -> tuple[I64, Mask]:
        """The holder in which each block is stored first, and whether only for the time being."""
        self._scaffold = self._scaffold_holder()
        counts = self._blocks.counts
        places = np.full(self._num, self._scaffold, dtype=np.int64)
        if self._scaffold == HOST:
            places[self._has(DISK) & ~self._has(HOST)] = DISK
            places[self._has(DEVICE)] = DEVICE
        places[self._is_in_cxl] = self._scaffold
        here = counts.get(self._scaffold)
        is_lent = places == self._scaffold
        return places, is_lent if here is None else is_lent & (here == 0)

    def _scaffold_holder(self) -> int:
        """Host memory: nobody expects blocks there to stay. A rank that has only groups with
        windows has none, and takes a group.
        """
        has_main = self._listing.main is not None or self._has(HOST).any() or self._has(DISK).any()
        if self._listing.is_hybrid and not has_main and self._listing.others:
            return GROUP + min(self._listing.others)
        return HOST

    def _run_starts(self, places: I64, labels: I64, chosen: Mask | None = None) -> I64:
        """Where a block does not simply follow the one before it."""
        before = np.arange(-1, self._num - 1)
        is_start = self._blocks.parents != before
        is_start[:1] = True
        for column in (places, labels):
            is_start[1:] |= column[1:] != column[:-1]
        if chosen is not None:
            is_start[1:] |= ~chosen[:-1]
            is_start &= chosen
        starts = np.flatnonzero(is_start)
        return _without_long_runs(starts, self._num)

    def _label_numbers(self) -> I64:
        numbers = np.zeros(self._num, dtype=np.int64)
        if self._listing.labels:
            known = dict[MoeLabel, int]()
            of_hash = {
                hash_: known.setdefault(label, len(known) + 1)
                for hash_, label in self._listing.labels.items()
            }
            numbers[:] = [of_hash.get(hash_, 0) for hash_ in self._blocks.hashes.tolist()]
        return numbers

    def _plain_run(self, first: int, end: int, tier: int) -> Packed:
        at = slice(_WORD * first, _WORD * end)
        event = [0, tier, self._parent_name(first), int(self._blocks.seeds[first])]
        return (
            _HEAD_BYTES + 2 * _WORD * (end - first),
            [*event, self._name_bytes[at], self._hash_bytes[at]],
        )

    def _run(self, first: int, end: int, holder: int, label: MoeLabel | None) -> PackedStored:
        group, kind, tier = self._place(holder)
        at, seed = slice(first, end), int(self._blocks.seeds[first])
        blocks = self._blocks.names[at], self._blocks.hashes[at]
        parent = self._parent_name(first)
        return PackedStored(*blocks, parent, tier, seed, group, *kind, moe=label)

    def _parent_name(self, place: int) -> int | None:
        parent = self._blocks.parents[place]
        return None if parent == NO_PARENT else int(self._blocks.names[parent])

    def _place(self, holder: int) -> tuple[int, GroupKind, Tier]:
        """Group, kind and tier that an event names for a holder."""
        if holder < GROUP:
            return self._group, FULL, Tier(holder)
        return holder - GROUP, self._listing.others[holder - GROUP], Tier.DEVICE

    # What groups there are.

    def _roles(self) -> Iterator[Packed]:
        """Declared by copies of no blocks: first each as one with states, so that none of them
        becomes the main group; then the main one, and what the others are.
        """
        if not self._listing.is_hybrid:
            return
        for group in self._listing.others:
            yield packed(PackedCopied((), Tier.DEVICE, group, MAMBA))
        if self._listing.main is not None:
            yield packed(PackedCopied((), Tier.DEVICE, self._listing.main, *FULL))
        for group, kind in self._listing.others.items():
            if kind != GroupKind(MAMBA, None):
                empty = PackedStored((), (), group=group, attention=kind.attention,
                                     sliding_window=kind.sliding_window)  # fmt: skip
                yield packed(empty)

    # CXL.

    def _pools(self) -> Iterator[Packed]:
        placed: dict[CxlMetadata, list[int]] = {}
        for at in np.flatnonzero(self._is_in_cxl).tolist():
            said = self._listing.metadata[int(self._blocks.hashes[at])]
            placed.setdefault(said, []).append(at)
        for said, places in placed.items():
            if said.state is CxlState.EVICTED:  # only what has been somewhere is evicted
                yield from self._moved(places, CxlState.IN_TRANSIT, said)
            yield from self._moved(places, said.state, said)
            if said.state in (CxlState.LOCAL_GPU, CxlState.IN_TRANSIT):
                on_device = self._has(DEVICE)
                yield from self._removed([at for at in places if not on_device[at]], DEVICE)

    def _moved(self, places: list[int], state: CxlState, said: CxlMetadata) -> Iterator[Packed]:
        for names in self._named(places):
            where = said.pool_id, said.accessible_workers
            yield packed(PackedTransition(names, state, *where))

    def _is_on_device_already(self) -> Mask:
        """Blocks of which the events so far leave a copy there."""
        has = self._has(DEVICE) & ~self._is_in_cxl
        if self._scaffold != HOST:
            has &= False
        moved = (CxlState.LOCAL_GPU, CxlState.IN_TRANSIT)
        for at in np.flatnonzero(self._is_in_cxl).tolist():
            said = self._listing.metadata[int(self._blocks.hashes[at])]
            has[at] = said.state in moved and self._has(DEVICE)[at]
        return has

    # Further copies.

    def _copies(self) -> Iterator[Packed]:
        places, _ = self._first_places()
        for holder, counts in self._blocks.counts.items():
            if holder in (DEVICE, HOST, DISK) or holder >= GROUP:
                is_there = self._is_on_device_already() if holder == DEVICE else places == holder
                missing = counts.astype(np.int64) - (is_there & (counts > 0))
                yield from self._missing(holder, missing)

    def _missing(self, holder: int, missing: I64) -> Iterator[Packed]:
        group, kind, tier = self._place(holder)
        while (missing > 0).any():
            chosen = missing > 0
            if tier is Tier.DEVICE:
                for names in self._named(np.flatnonzero(chosen).tolist()):
                    yield packed(PackedCopied(names, tier, group, *kind))
            else:  # a copy in a lower tier, said without its content, is a connector's
                yield from self._stored_once(holder, chosen)
            missing = missing - chosen

    def _stored_once(self, holder: int, chosen: Mask) -> Iterator[Packed]:
        same = np.zeros(self._num, dtype=np.int64)
        starts = self._run_starts(same, same, chosen)
        for first in starts.tolist():
            end = first + 1
            limit = min(self._num, first + MAX_BLOCKS)
            while end < limit and chosen[end] and self._blocks.parents[end] == end - 1:
                end += 1
            yield packed(self._run(first, end, holder, None))

    def _offloaded_copies(self) -> Iterator[Packed]:
        """Of a connector's copies an index remembers how many there were, and of which depths."""
        num_copies, per_chunk = self._listing.offloaded
        at = np.flatnonzero(self._blocks.depths + 1 == per_chunk)
        if not num_copies or not len(at) or self._listing.main is None:
            return
        chain = [int(at[0])]
        while (parent := int(self._blocks.parents[chain[-1]])) != NO_PARENT:
            chain.append(parent)
        chain.reverse()
        for place in chain:
            yield packed(self._run(place, place + 1, HOST, None))
        name = int(self._blocks.names[chain[-1]])
        num_said = min(num_copies, _MIN_COPIES)
        yield packed(PackedCopied([name] * num_said, Tier.HOST, self._group))
        if per_chunk == 1 or num_said < _MIN_COPIES:  # else the tier is empty now
            yield from self._removed([*chain, *[chain[-1]] * num_said], HOST)

    def _ghosts_go(self) -> Iterator[Packed]:
        # The last ones first: a block that goes before those behind it would be looked for.
        yield from self._removed(np.flatnonzero(self._is_lent).tolist(), self._scaffold)

    def _removed(self, places: list[int], holder: int) -> Iterator[Packed]:
        group, _, tier = self._place(holder)
        for names in self._named(places):
            yield packed(PackedRemoved(names, tier, group))

    # Blocks of the arrays.

    def _named(self, places: list[int]) -> Iterator[list[int]]:
        for first in range(0, len(places), MAX_BLOCKS):
            yield self._blocks.names[places[first : first + MAX_BLOCKS]].tolist()

    def _has(self, holder: int) -> Mask:
        counts = self._blocks.counts.get(holder)
        return np.zeros(self._num, dtype=np.bool_) if counts is None else counts > 0

    def _which(self, of_hashes: dict[int, CxlMetadata]) -> Mask:
        if not of_hashes:
            return np.zeros(self._num, dtype=np.bool_)
        wanted = np.array(list(of_hashes), dtype=np.uint64)
        return np.asarray(np.isin(self._blocks.hashes, wanted))


def _without_long_runs(starts: I64, num: int) -> I64:
    """Further starts, so that no run is longer than MAX_BLOCKS."""
    lengths = np.diff(starts, append=num)
    if not (lengths > MAX_BLOCKS).any():
        return starts
    long = zip(starts.tolist(), lengths.tolist(), strict=True)
    split = [first + more for first, length in long for more in range(0, length, MAX_BLOCKS)]
    return np.array(split, dtype=np.int64)
