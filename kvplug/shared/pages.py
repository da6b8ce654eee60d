"""Pages: which arrays the indexes of a fleet have now, and who is behind the numbers in them.

In:  the groups of a fleet, the files that their arrays are in.   Out: msgpack, and back.

A page belongs to one generation. What queries read beside the arrays is small and changes seldom:
it is in the page, and a change of it is a new generation.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from kvplug.events import Rank
from kvplug.index.block_index import BlockIndex
from kvplug.index.cache_groups import CacheGroup, GroupKind, RankGroups
from kvplug.router.index_group import IndexGroup

SHARED_ARRAYS: Final = ("table", "runs", "bits", "header")
"""Of index/block_store.py, ARRAYS: those that queries read."""


class PagePool(msgspec.Struct, frozen=True, array_like=True):
    """holder: of a rank's copies that the workers can read, too."""

    holder: int
    rank: int
    workers: tuple[str, ...]


class PageCacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """A KV cache group that is not the main one of its rank."""

    number: int
    holder: int
    attention: str
    sliding_window: int | None


class PageRank(msgspec.Struct, frozen=True, array_like=True):
    """KV cache groups of a rank, by its number."""

    rank: int
    main: int | None
    others: list[PageCacheGroup]


class PageIndex(msgspec.Struct, frozen=True, kw_only=True):
    """One index. arrays: the files of SHARED_ARRAYS; facts: that of kernels/peer_load.py; ranks,
    owner, num_recomputed: by number.
    """

    model: str
    block_size: int
    bigrams: bool
    arrays: dict[str, str]
    facts: str
    ranks: list[Rank | None]
    owner: list[int]
    pools: list[PagePool]
    groups: list[PageRank]
    num_recomputed: list[int]


class Page(msgspec.Struct, frozen=True):
    """The indexes of a fleet."""

    indexes: list[PageIndex]


def page_of(group: IndexGroup, arrays: dict[str, str], facts: str) -> PageIndex:
    """One group as it is now, with its arrays in these files."""
    index = group.index
    numbers, cache_groups = index.numbers, index.cache_groups
    return PageIndex(
        model=group.model,
        block_size=group.block_size,
        bigrams=index.bigrams,
        arrays=arrays,
        facts=facts,
        ranks=list(numbers.ranks),
        owner=numbers.owner.tolist(),
        pools=[PagePool(holder, *behind) for holder, behind in numbers.pools.items()],
        groups=[_page_rank(*each) for each in cache_groups.items()],
        num_recomputed=[cache_groups.num_recomputed(n) for n in range(len(numbers.ranks))],
    )


def fill_numbers(index: BlockIndex, page: PageIndex) -> None:
    """The numbers of an index are those of the page from now on."""
    pools = {each.holder: (each.rank, each.workers) for each in page.pools}
    holders_of = {each.rank: [other.holder for other in each.others] for each in page.groups}
    owner = np.array(page.owner, dtype=np.int64)
    index.numbers.load(list(page.ranks), owner, pools, holders_of)
    index.cache_groups.load({each.rank: _rank_groups(each) for each in page.groups})
    for number, num_blocks in enumerate(page.num_recomputed):
        if num_blocks != index.cache_groups.num_recomputed(number):
            index.cache_groups.set_recomputed(number, num_blocks)


def encode(page: Page) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(page)


def decode(content: bytes) -> Page:
    """What `encode` made."""
    return msgspec.msgpack.decode(content, type=Page)


def _page_rank(rank_number: int, groups: RankGroups) -> PageRank:
    others = [
        PageCacheGroup(number, other.holder, *other.kind) for number, other in groups.others.items()
    ]
    return PageRank(rank_number, groups.main, others)


def _rank_groups(page: PageRank) -> RankGroups:
    others = {
        each.number: CacheGroup(each.holder, GroupKind(each.attention, each.sliding_window))
        for each in page.others
    }
    return RankGroups(page.main, others)
