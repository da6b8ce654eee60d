"""Blocks in a few arrays, by the names that an engine gives them: who holds how many copies.

In:  engine hashes, sequence hashes, holders.   Out: the slots of blocks, counts, a frozen copy.

A holder is a number: of a tier (0, 1, 2), POOL, or GROUP + the number of a KV cache group. A block
without copies is a ghost as long as a block behind it has some, or its CXL metadata is kept: its
name is nobody's then, as in an index. Slots rise with time, so parents come before their children
and the blocks of one event are neighbours; those of blocks that are gone are squeezed out when they
are the half.

Memory: about 270 bytes per block, 40 of them in arrays; the rest is a dict and a set of integers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Counts = dict[int, I64]

DEVICE, HOST, DISK, POOL, GROUP = 0, 1, 2, 3, 4
NO_PARENT: Final = -1

_MIN_GONE: Final = 4096
# Of the dict at once, so that the engine's thread gets its turn in between.
_NUM_RENAMED: Final = 2048


class FrozenBlocks(NamedTuple):
    """Of n blocks, parents first: names and hashes uint64[n], parents int64[n] (their places here,
    -1 without one), depths and seeds, whether they have copies, and counts by holder.
    """

    names: U64
    hashes: U64
    parents: I64
    depths: I64
    seeds: U64
    has_copies: Mask
    counts: Counts


class ResidentBlocks:
    """known, store, add_copy, drop_copy, drop_all; freeze.

    slot_of: engine hash -> slot of what has copies; num_held: blocks by holder. `is_kept` tells of
    a sequence hash whether its block is to stay without copies; `on_gone` is told of each that
    loses its last one.
    """

    def __init__(
        self,
        is_kept: Callable[[int], bool] = lambda _: False,
        on_gone: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._is_kept, self._on_gone = is_kept, on_gone
        self.slot_of: dict[int, int] = {}
        self._contents: set[int] = set()
        self._ghosts: dict[int, int] = {}
        self.names, self.hashes, self.seeds = array("Q"), array("Q"), array("Q")
        self._parents, self.depths = array("i"), array("I")
        self._num_children, self._num_copies = array("I"), array("I")
        self._is_used = array("B")
        self._counts: dict[int, array[int]] = {DEVICE: array("I")}
        self._num_gone = 0
        self.num_held: dict[int, int] = {}

    def __len__(self) -> int:
        """How many blocks have copies."""
        return len(self.slot_of)

    def store(
        self,
        names: Sequence[int],
        hashes: Sequence[int],
        parent: int | None,
        seed: int,
        holder: int,
    ) -> Sequence[int] | None:
        """One more copy of consecutive blocks behind the slot `parent`; their slots.

        None, and nothing done, if a name stands for other content, or content has another name.
        """
        slots = list(map(self.slot_of.get, names))
        is_new = slots.count(None) == len(slots) and self._contents.isdisjoint(hashes)
        if is_new and len(set(names)) == len(names) and self._ghosts.keys().isdisjoint(hashes):
            return self._append(names, hashes, parent, seed, holder)
        if not self._fit(names, hashes, slots):
            return None
        stored = [
            parent := self._slot(name, hash_, parent, seed)
            for name, hash_ in zip(names, hashes, strict=True)
        ]
        self.add_copies(stored, holder)
        return stored

    def counts_of(self, holder: int) -> array[int]:
        """Copies by slot."""
        counts = self._counts.get(holder)
        if counts is None:
            counts = self._counts[holder] = array("I", bytes(4 * len(self.names)))
        return counts

    def add_copies(self, slots: Iterable[int], holder: int) -> None:
        """The holder has one more copy of each."""
        counts, num_copies, num_new = self.counts_of(holder), self._num_copies, 0
        for slot in slots:
            num_new += not counts[slot]
            counts[slot] += 1
            num_copies[slot] += 1
        self.num_held[holder] = self.num_held.get(holder, 0) + num_new

    def drop_copies(self, slots: Iterable[int], holder: int) -> None:
        """The holder has one copy less of each of these, of which it has one."""
        counts, num_copies = self.counts_of(holder), self._num_copies
        for slot in slots:
            counts[slot] -= 1
            num_copies[slot] -= 1
            self.num_held[holder] -= not counts[slot]
            if not num_copies[slot]:
                self._lose(slot)

    def remove(self, names: Iterable[int], holder: int) -> list[int]:
        """The holder has one copy less of each block that it has; the names of these."""
        counts, num_copies, slot_of = self.counts_of(holder), self._num_copies, self.slot_of
        removed, num_lost = [], 0
        for name in names:
            slot = slot_of.get(name)
            if slot is None or not counts[slot]:
                continue
            removed.append(name)
            counts[slot] -= 1
            num_copies[slot] -= 1
            num_lost += not counts[slot]
            if not num_copies[slot]:
                self._lose(slot)
        self.num_held[holder] = self.num_held.get(holder, 0) - num_lost
        return removed

    def drop_all(self, slot: int, holder: int) -> None:
        """The holder has no copy any more, however many it had."""
        self.drop_copies([slot] * self.counts_of(holder)[slot], holder)

    def drop_everywhere(self, slot: int) -> None:
        """Nobody has a copy any more."""
        for holder, counts in self._counts.items():
            if counts[slot]:
                self.drop_all(slot, holder)

    @property
    def groups(self) -> list[int]:
        """The holders that are KV cache groups."""
        return [holder for holder in self._counts if holder >= GROUP]

    def held_by(self, holder: int) -> list[int]:
        """The slots of which the holder has copies."""
        return np.flatnonzero(np.array(self.counts_of(holder))).tolist()

    def is_ghost(self, hash_: int) -> bool:
        """Whether a block without copies is still here."""
        return hash_ in self._ghosts

    def forget_ghost(self, hash_: int) -> None:
        """It is kept no longer, unless a block behind it is."""
        slot = self._ghosts.get(hash_)
        if slot is not None and not self._num_children[slot]:
            self._free(slot)

    def squeeze(self) -> None:
        """Give back the slots of blocks that are gone, if these are the half; slots change."""
        if self._num_gone < max(_MIN_GONE, len(self.names) // 2):
            return
        keep = np.flatnonzero(np.array(self._is_used))
        self._move(keep)
        for first in range(0, len(keep), _NUM_RENAMED):
            self._rename(range(first, min(first + _NUM_RENAMED, len(keep))))
        self._num_gone = 0

    def freeze(self) -> FrozenBlocks:
        """A copy of what is here now."""
        keep = np.flatnonzero(np.array(self._is_used))
        place = np.full(len(self._is_used) + 1, NO_PARENT, dtype=np.int64)  # [-1]: no parent
        place[keep] = np.arange(len(keep))
        counts = {holder: np.array(each)[keep] for holder, each in self._counts.items()}
        names, hashes = np.array(self.names)[keep], np.array(self.hashes)[keep]
        has_copies = np.array(self._num_copies)[keep] > 0
        return FrozenBlocks(
            self._names_with_ghosts(names, hashes, has_copies),
            hashes,
            place[np.array(self._parents)[keep]],
            np.array(self.depths)[keep].astype(np.int64),
            np.array(self.seeds)[keep],
            has_copies,
            counts,
        )

    def _names_with_ghosts(self, names: U64, hashes: U64, has_copies: Mask) -> U64:
        """The name of a ghost may be another block's by now: those get names that nobody has."""
        taken = set[int]()
        for at in np.flatnonzero(~has_copies).tolist():
            name = int(names[at])
            if name in self.slot_of or name in taken:
                name = int(hashes[at])
                while name in self.slot_of or name in taken:
                    name = (name + 1) % 2**64
                names[at] = name
            taken.add(name)
        return names

    def _append(
        self,
        names: Sequence[int],
        hashes: Sequence[int],
        parent: int | None,
        seed: int,
        holder: int | None = None,
    ) -> range:
        """New blocks, in one step for each array, with a copy each if a holder has them."""
        if holder is not None:
            self.counts_of(holder)  # before the arrays grow
        first, num = len(self.names), len(names)
        depth = 0 if parent is None else self.depths[parent] + 1
        self.names.extend(names)
        self.hashes.extend(hashes)
        self.seeds.extend([seed] * num)
        self._parents.append(NO_PARENT if parent is None else parent)
        self._parents.extend(range(first, first + num - 1))
        self.depths.extend(range(depth, depth + num))
        self._num_children.extend([1] * (num - 1))
        self._num_children.append(0)
        self._is_used.extend([1] * num)
        copies = [0 if holder is None else 1] * num
        self._num_copies.extend(copies)
        if holder is not None:
            self.counts_of(holder).extend(copies)
            self.num_held[holder] = self.num_held.get(holder, 0) + num
        for each, counts in self._counts.items():
            if each != holder:
                counts.extend([0] * num)
        if parent is not None:
            self._num_children[parent] += 1
        slots = range(first, first + num)
        self.slot_of.update(zip(names, slots, strict=True))
        self._contents.update(hashes)
        return slots

    def _fit(self, names: Sequence[int], hashes: Sequence[int], slots: list[int | None]) -> bool:
        """Whether names and contents go together, within the event, too."""
        if len(set(names)) < len(names):
            return False
        return all(
            hash_ not in self._contents if slot is None else self.hashes[slot] == hash_
            for hash_, slot in zip(hashes, slots, strict=True)
        )

    def _slot(self, name: int, hash_: int, parent: int | None, seed: int) -> int:
        slot = self.slot_of.get(name)
        if slot is not None:
            return slot
        slot = self._ghosts.pop(hash_, None)
        if slot is None:
            return self._append([name], [hash_], parent, seed)[0]
        self.names[slot], self.slot_of[name] = name, slot
        self._contents.add(hash_)
        return slot

    def _lose(self, slot: int) -> None:
        """The last copy is gone."""
        hash_ = self.hashes[slot]
        del self.slot_of[self.names[slot]]
        self._contents.discard(hash_)
        self._on_gone(hash_)
        if self._num_children[slot] or self._is_kept(hash_):
            self._ghosts[hash_] = slot
        else:
            self._free(slot)

    def _free(self, slot: int) -> None:
        """A block goes, and the ghosts before it that were here for its sake."""
        while slot != NO_PARENT:
            self._ghosts.pop(self.hashes[slot], None)
            self._is_used[slot] = 0
            self._num_gone += 1
            slot = self._parents[slot]
            if slot == NO_PARENT:
                return
            self._num_children[slot] -= 1
            if self._num_children[slot] or self._num_copies[slot]:
                return
            if self._is_kept(self.hashes[slot]):
                return

    def _move(self, keep: I64) -> None:
        place = np.full(len(self._is_used) + 1, NO_PARENT, dtype=np.int32)
        place[keep] = np.arange(len(keep))
        self._parents = array("i", place[np.array(self._parents)[keep]].tobytes())
        for name in ("names", "hashes", "seeds", "depths", "_num_children", "_num_copies"):
            setattr(self, name, _chosen(getattr(self, name), keep))
        self._is_used = _chosen(self._is_used, keep)
        self._counts = {holder: _chosen(each, keep) for holder, each in self._counts.items()}
        self._ghosts = {hash_: int(place[slot]) for hash_, slot in self._ghosts.items()}

    def _rename(self, slots: range) -> None:
        names = self.names[slots.start : slots.stop]
        num_copies = self._num_copies[slots.start : slots.stop]
        self.slot_of.update(
            (name, slot) for name, slot, n in zip(names, slots, num_copies, strict=True) if n
        )


def _chosen(values: array[int], keep: I64) -> array[int]:
    return array(values.typecode, np.array(values)[keep].tobytes())
