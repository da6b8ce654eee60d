"""IndexGroup: one index of a fleet, with what its blocks are, and the fleet's numbers of its ranks.

In:  numbers of ranks in the fleet.   Out: those in the index, and back; the workers in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError
from kvplug.events import Rank
from kvplug.index.block_index import BlockIndex

I64 = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Tokens per block, and whether an engine keys blocks by pairs of tokens (SGLang, EAGLE)."""

    size: int
    bigrams: bool = False


@dataclass(slots=True, eq=False)
class IndexGroup:
    """The index of one model, block size and kind of block (plain, or by pairs of tokens).

    model: "" until a worker in it names one. fleet_numbers[n]: the fleet's number of the index's
    rank n, -1 if there is none; None if both numberings are the same.
    """

    model: str
    block_size: int
    index: BlockIndex
    fleet_numbers: I64 | None = None

    @property
    def blocks(self) -> Blocks:
        """What its blocks are."""
        return Blocks(self.block_size, self.index.bigrams)

    @property
    def numbers(self) -> I64:
        """The fleet's numbers of its ranks."""
        if self.fleet_numbers is None:
            return np.arange(len(self.index.numbers.ranks))
        return self.fleet_numbers[self.fleet_numbers >= 0]

    def require_hashed(self, num_hashes: int, num_tokens: int) -> None:
        """ConfigError for hashes that cannot be those of a prompt of so many tokens."""
        hasher, size = self.index.hasher, f"{self.block_size} tokens"
        num_full = hasher.num_blocks(num_tokens)
        if not len(self.index):  # before the first block, its size may be a guess
            num_full, size = num_tokens, "a token or more"
        if num_hashes > num_full:
            raise ConfigError(
                f"cannot look up {num_hashes} hashes: expected at most {num_full}, the full blocks "
                f"of {size} in {num_tokens} tokens"
            )

    def index_ranks(self, num_ranks: int) -> I64:
        """int64[num_ranks]: the index's number of each rank of the fleet, 0 for those elsewhere."""
        numbers: I64 = np.zeros(num_ranks, dtype=np.int64)
        if self.fleet_numbers is None:
            numbers[:] = np.arange(num_ranks)
        else:
            here = np.flatnonzero(self.fleet_numbers >= 0)
            numbers[self.fleet_numbers[here]] = here
        return numbers


@dataclass(slots=True, eq=False)
class Member:
    """A worker: what is known of it, the group of its ranks, its taints, the CXL pools that it can
    read, and which ranks hold blocks.
    """

    model: str
    block_size: int | None
    group: IndexGroup
    taints: frozenset[str] = frozenset()
    cxl_pools: frozenset[int] = frozenset()
    ranks: list[Rank] = field(default_factory=list)
    joined_as: int = 0
    holding: set[Rank] = field(default_factory=set)  # stored something since it was last cleared


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """An index of a fleet that was saved, and the model of its workers, "" if none named one."""

    model: str
    index: BlockIndex

    @property
    def workers(self) -> list[str]:
        """Those that it has ranks of."""
        return sorted({rank.worker for rank in self.index.numbers.ranks if rank})

    def fits(self, member: Member, block_size: int | None) -> bool:
        """Whether blocks of the worker can be these; block_size: what it was said to have."""
        is_model = "" in (self.model, member.model) or self.model == member.model
        return is_model and block_size in (None, self.index.block_size)
