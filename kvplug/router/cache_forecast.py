"""The arrays of kernels/forecast.py, which grow.

In:  prompts routed to ranks.   Out: what the ranks' caches will hold once they have served them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.errors import IndexCorruptError
from kvplug.hashing import Hashes
from kvplug.index.arrays import ArrayVersion
from kvplug.index.hash_table import HashTable
from kvplug.kernels import forecast as kernels

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

_MIN_NODES = 256


class CacheForecast:
    """reserve, then let a kernel change `arrays`; or use, num_held, num_blocks, forget."""

    def __init__(self, version: ArrayVersion | None = None) -> None:
        """`version` counts when one of `arrays` has become another array."""
        self._version = version or ArrayVersion()
        self._table = HashTable(self._version)
        self._keys: U64 = np.zeros(0, dtype=np.uint64)
        self._links: I32 = np.zeros(0, dtype=np.int32)
        self._ends: I64 = np.array([kernels.NOBODY, 0], dtype=np.int64)

    @property
    def arrays(self) -> tuple[U64, U64, I32, I64]:
        """As kernels/forecast.py has them."""
        return self._table.slots, self._keys, self._links, self._ends

    def reserve(self, num_ranks: int, num_blocks: int) -> None:
        """Make room for a prompt of so many blocks on any of so many ranks."""
        self._reserve_ranks(num_ranks)
        num_more = -(-num_blocks // kernels.CHUNK) + 1
        self._table.reserve(num_more)
        if int(self._ends[kernels.NUM_FREE]) < num_more:
            self._add_nodes(max(num_more, len(self._keys), _MIN_NODES))

    def use(self, rank: int, hashes: Hashes, num_new: int, capacity: int) -> None:
        """A prompt was routed to the rank, which computes num_new blocks for it."""
        self.reserve(rank + 1, len(hashes))
        kernels.use_prompt(rank, hashes, num_new, capacity, *self.arrays)

    def num_held(self, rank: int, hashes: Hashes) -> int:
        """How many leading blocks the rank will hold."""
        self._reserve_ranks(rank + 1)
        return int(kernels.count_held(rank, hashes, *self.arrays))

    def num_blocks(self, rank: int) -> int:
        """How many blocks the rank will hold, of all prompts."""
        self._reserve_ranks(rank + 1)
        return int(self._ends[kernels.NUM_SHARED + kernels.END_WIDTH * rank + kernels.NUM_BLOCKS])

    def forget(self, rank: int) -> None:
        """The rank's cache is empty, or gone."""
        self._reserve_ranks(rank + 1)
        kernels.forget(rank, *self.arrays)

    def check(self) -> None:
        """Lists, counts and table agree; raises IndexCorruptError."""
        self._table.check()
        links = self._links.reshape(-1, kernels.LINK_WIDTH)
        num_linked = num_keyed = 0
        for rank in range((len(self._ends) - kernels.NUM_SHARED) // kernels.END_WIDTH):
            first = kernels.NUM_SHARED + kernels.END_WIDTH * rank
            oldest, youngest, num_blocks = self._ends[first : first + 3].tolist()
            nodes = _follow(links, oldest)
            is_whole = not nodes or nodes[-1] == youngest
            if not is_whole or links[nodes, kernels.BLOCKS].sum() != num_blocks:
                raise IndexCorruptError(f"forecast: the list of rank {rank} is not whole")
            places = self._table.find(self._keys[nodes])
            num_keyed += int((places == np.array(nodes, dtype=np.uint64) + np.uint64(1)).sum())
            num_linked += len(nodes)
        num_free = len(_follow(links, int(self._ends[kernels.FREE])))
        if num_free != self._ends[kernels.NUM_FREE] or num_free + num_linked != len(links):
            raise IndexCorruptError("forecast: a node is neither used nor free")
        if num_keyed != len(self._table):
            raise IndexCorruptError("forecast: a chunk has no node")

    def _reserve_ranks(self, num_ranks: int) -> None:
        known = (len(self._ends) - kernels.NUM_SHARED) // kernels.END_WIDTH
        if num_ranks > known:
            empty = [kernels.NOBODY, kernels.NOBODY, 0] * (num_ranks - known)
            self._ends = np.concatenate([self._ends, np.array(empty, dtype=np.int64)])
            self._version.count += 1

    def _add_nodes(self, num_more: int) -> None:
        """Free nodes, before those that are free already."""
        first, end = len(self._keys), len(self._keys) + num_more
        links: I32 = np.full((num_more, kernels.LINK_WIDTH), kernels.NOBODY, dtype=np.int32)
        links[:, kernels.AFTER] = [*range(first + 1, end), int(self._ends[kernels.FREE])]
        self._keys = np.concatenate([self._keys, np.zeros(num_more, dtype=np.uint64)])
        self._links = np.concatenate([self._links, links.reshape(-1)])
        self._ends[kernels.FREE] = first
        self._ends[kernels.NUM_FREE] += num_more
        self._version.count += 1


def _follow(links: I32, node: int) -> list[int]:
    """A node and all behind it."""
    nodes: list[int] = []
    while node != kernels.NOBODY and len(nodes) <= len(links):
        nodes.append(node)
        node = int(links[node, kernels.AFTER])
    return nodes
