"""Which engine hash space each rank is in.

In:  ranks, engine hashes.   Out: sequence hashes; domains with the bits of their holders.

Ranks begin in one common domain, as engines of one kind give equal blocks equal engine hashes. One
whose hashes disagree is moved into a domain of its own, with the names of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.events import Rank, SequenceHash
from kvplug.index.domain import Domain
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.holdings import NAMELESS, Holdings
from kvplug.kernels import checking

U64 = npt.NDArray[np.uint64]


class Domains:
    """len and iteration over those in use; add, remove, part; of, named, hash_of."""

    def __init__(self, numbers: HolderNumbers, holdings: Holdings) -> None:
        self.numbers, self._holdings, self._changes = numbers, holdings, holdings.changes
        self._domain_of: dict[Rank, Domain] = {}
        self.common = Domain(self._changes)

    def __len__(self) -> int:
        """How many are in use."""
        return len(self.in_use)

    def __iter__(self) -> Iterator[Domain]:
        return iter(self.in_use)

    @property
    def in_use(self) -> set[Domain]:
        """Those that ranks are in."""
        return set(self._domain_of.values())

    @property
    def all(self) -> list[Domain]:
        """Those in use, and the common one, which is the first."""
        return [self.common, *(self.in_use - {self.common})]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of their tables."""
        return sum(domain.table.nbytes for domain in self.all)

    def ranks_of(self, worker: str) -> list[Rank]:
        """The ranks of a worker."""
        return [rank for rank in self._domain_of if rank.worker == worker]

    def get(self, rank: Rank) -> Domain | None:
        """The domain of a rank, None if it is not followed."""
        return self._domain_of.get(rank)

    def of(self, rank: Rank) -> Domain:
        """The domain of a rank."""
        return self._domain_of[rank]

    def add(self, rank: Rank, domain: Domain | None = None) -> None:
        """The rank is in this domain from now on, in the common one by default."""
        domain = domain or self.common
        self._domain_of[rank] = domain
        domain.ranks.add(rank)
        self.numbers.add(rank)
        self._changes.count += 1

    def remove(self, rank: Rank) -> None:
        """The rank, which holds nothing, goes."""
        self._domain_of.pop(rank).ranks.discard(rank)
        self.numbers.remove(rank)
        self._changes.count += 1

    def load(self, ranks: list[list[Rank]], names: list[U64], common: int) -> None:
        """Be what other domains were; numbers and holdings are loaded."""
        domains = [Domain(self._changes, slots) for slots in names]
        self.common = domains[common]
        for members, domain in zip(ranks, domains, strict=True):
            domain.ranks.update(members)
            self._domain_of.update(dict.fromkeys(members, domain))
        self._changes.count += 1

    def members_of(self, domain: Domain) -> U64:
        """The holders of its ranks as bits; none at all if there is no other domain."""
        if len(domain.ranks) == len(self.numbers):
            return NAMELESS
        return self._holdings.sets.mask_of(self.numbers.holders_of(domain.ranks))

    def named(self, domain: Domain) -> tuple[U64, U64]:
        """Slots and members, as kernels/residency.py wants them."""
        return domain.table.slots, self.members_of(domain)

    def hash_of(self, rank: Rank, name: int | None) -> SequenceHash | None:
        """What the rank calls by a name, None if nothing."""
        if name is None:
            return None
        hash_ = int(self.of(rank).table.find(np.array([name], dtype=np.uint64))[0])
        return SequenceHash(hash_) if hash_ else None

    def part(self, rank: Rank) -> None:
        """Into a domain of its own, with its names; the others forget what only it held."""
        common, own = self.of(rank), Domain(self._changes)
        names, hashes = common.table.items()
        common.ranks.discard(rank)
        self.add(rank, own)
        mine = self._holdings.which_held(hashes, self.numbers.holders_of(own.ranks))
        own.table.put(names[mine], hashes[mine])
        theirs = self._holdings.which_held(hashes, self.numbers.holders_of(common.ranks))
        common.table.erase(names[~theirs])
        self._changes.count += 1

    def check(self) -> None:
        """Names and held blocks pair up in each; raises IndexCorruptError."""
        for rank, domain in self._domain_of.items():
            if rank not in domain.ranks or rank not in self.numbers:
                raise IndexCorruptError(f"index: {rank} is in no domain or has no number")
        for domain in self.in_use:
            self._check(domain)

    def _check(self, domain: Domain) -> None:
        domain.table.check()
        names, members = self.named(domain)
        held, words = self._holdings, self._holdings.sets.words
        seen = np.zeros(held.table.capacity // 8 + 1, dtype=np.uint8)
        arrays = held.table.slots, held.runs.words, held.sets.bits, words, members
        num_named = checking.count_named(names, *arrays, seen)
        if not len(domain.table) == num_named == checking.count_held(*arrays):
            raise IndexCorruptError("domain: engine hashes and held blocks do not pair up")
