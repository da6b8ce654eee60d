"""Hash spaces: ranks that give equal blocks equal engine hashes, and the table that they share.

In:  ranks, engine hashes.   Out: sequence hashes; the arrays of a rank's hash space.

All ranks begin in one common hash space, as engines of one kind agree. A rank whose engine hashes
contradict the others' moves into a hash space of its own, with the engine hashes of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import Rank, SequenceHash
from kvplug.hashing import as_hashes
from kvplug.index.arrays import ArrayVersion
from kvplug.index.block_store import NO_ENGINE_HASHES, BlockStore, HashSpaceArrays
from kvplug.index.hash_table import HashTable, least_nbytes
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.kernels import checking

U64 = npt.NDArray[np.uint64]

_MIN_HASHES = 800  # not where memory is bounded, as there may be a hash space for each rank


class HashSpace:
    """Its ranks, and their table, engine hash -> sequence hash."""

    def __init__(self, version: ArrayVersion, slots: U64 | None = None) -> None:
        self.ranks: set[Rank] = set()
        self.table = HashTable(version, slots)
        self.table.reserve(0 if slots is not None or version.is_tight else _MIN_HASHES)


class HashSpaces:
    """The hash space of each rank: add, remove, part; of, arrays_of, hash_of.

    len and iteration are over those in use.
    """

    def __init__(self, numbers: HolderNumbers, block_store: BlockStore) -> None:
        self.numbers, self.block_store, self._version = numbers, block_store, block_store.version
        self._hash_space_of: dict[Rank, HashSpace] = {}
        self.common = HashSpace(self._version)

    def __len__(self) -> int:
        """How many are in use."""
        return len(self.in_use)

    def __iter__(self) -> Iterator[HashSpace]:
        return iter(self.in_use)

    @property
    def in_use(self) -> set[HashSpace]:
        """Those that ranks are in."""
        return set(self._hash_space_of.values())

    @property
    def all(self) -> list[HashSpace]:
        """Those in use, and the common one, which is the first."""
        return [self.common, *(self.in_use - {self.common})]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of their tables."""
        return sum(hash_space.table.nbytes for hash_space in self.all)

    def least_nbytes(self, num_hashes: int) -> int:
        """Bytes of memory if so many engine hashes came into one, and none were in the others."""
        return least_nbytes(num_hashes) + (len(self.all) - 1) * least_nbytes(0)

    def shrink(self) -> bool:
        """Have a table give memory back that it does not need; False if there is not much."""
        return any(hash_space.table.shrink() for hash_space in self.all)

    def ranks_of(self, worker: str) -> list[Rank]:
        """The ranks of a worker."""
        return [rank for rank in self._hash_space_of if rank.worker == worker]

    def get(self, rank: Rank) -> HashSpace | None:
        """The hash space of a rank, None if it is not followed."""
        return self._hash_space_of.get(rank)

    def of(self, rank: Rank) -> HashSpace:
        """The hash space of a rank."""
        return self._hash_space_of[rank]

    def add(self, rank: Rank, hash_space: HashSpace | None = None) -> None:
        """The rank is in this hash space from now on, in the common one by default."""
        hash_space = hash_space or self.common
        self._hash_space_of[rank] = hash_space
        hash_space.ranks.add(rank)
        self.numbers.add(rank)
        self._version.count += 1

    def remove(self, rank: Rank) -> None:
        """The rank, which holds nothing, goes."""
        self._hash_space_of.pop(rank).ranks.discard(rank)
        self.numbers.remove(rank)
        self._version.count += 1

    def load(self, ranks: list[list[Rank]], slots_of: list[U64], common: int) -> None:
        """Be what other hash spaces were; numbers and the block store are loaded."""
        hash_spaces = [HashSpace(self._version, slots) for slots in slots_of]
        self.common = hash_spaces[common]
        for members, hash_space in zip(ranks, hash_spaces, strict=True):
            hash_space.ranks.update(members)
            self._hash_space_of.update(dict.fromkeys(members, hash_space))
        self._version.count += 1

    def members_of(self, hash_space: HashSpace) -> U64:
        """uint64[words], the holders of its ranks as bits; NO_ENGINE_HASHES if all ranks are."""
        if len(hash_space.ranks) == len(self.numbers):
            return NO_ENGINE_HASHES
        return self.block_store.sets.mask_of(self.numbers.holders_of(hash_space.ranks))

    def arrays_of(self, hash_space: HashSpace) -> HashSpaceArrays:
        """Its arrays as they are now; they are replaced as the table or the fleet grows."""
        return hash_space.table.slots, self.members_of(hash_space)

    def hash_of(self, rank: Rank, engine_hash: int | None) -> SequenceHash | None:
        """The sequence hash of what the rank calls by an engine hash, None if it is unknown."""
        if engine_hash is None:
            return None
        hash_ = int(self.of(rank).table.find(as_hashes([engine_hash]))[0])
        return SequenceHash(hash_) if hash_ else None

    def part(self, rank: Rank) -> None:
        """Move the rank into a hash space of its own, with its engine hashes.

        The hash space that it leaves forgets those of blocks that only this rank held.
        """
        common, own = self.of(rank), HashSpace(self._version)
        engine_hashes, hashes = common.table.items()
        common.ranks.discard(rank)
        self.add(rank, own)
        mine = self.block_store.which_held(hashes, self.numbers.holders_of(own.ranks))
        own.table.put(engine_hashes[mine], hashes[mine])
        theirs = self.block_store.which_held(hashes, self.numbers.holders_of(common.ranks))
        common.table.erase(engine_hashes[~theirs])
        self._version.count += 1

    def check(self) -> None:
        """Engine hashes and held blocks pair up in each; raises IndexCorruptError."""
        for rank, hash_space in self._hash_space_of.items():
            if rank not in hash_space.ranks or rank not in self.numbers:
                raise IndexCorruptError(f"index: {rank} is in no hash space or has no number")
        for hash_space in self.in_use:
            self._check(hash_space)

    def _check(self, hash_space: HashSpace) -> None:
        hash_space.table.check()
        slots, members = self.arrays_of(hash_space)
        held, words = self.block_store, self.block_store.sets.words
        seen = np.zeros(held.table.capacity // 8 + 1, dtype=np.uint8)
        arrays = held.table.slots, held.runs.words, held.sets.bits, words, members
        num_hashes = checking.count_engine_hashes(slots, *arrays, seen)
        if not len(hash_space.table) == num_hashes == checking.count_held(*arrays):
            raise IndexCorruptError("hash space: engine hashes and held blocks do not pair up")
