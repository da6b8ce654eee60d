"""The interface of an annotation: something that an index knows of blocks besides who holds them.

In:  what happens to blocks of a rank.   Out: whatever the annotation is asked for by its own
methods; its state for a snapshot.

BlockIndex knows no annotation by name. It tells those in its list (kvplug/index/annotations.py),
in the order of the list:

    on_stored        the rank has stored blocks                  if `concerns(event)`
    on_event         an event that is the annotation's alone     if it is of `event_type`
    on_removed       the rank may have fewer copies of blocks    while `needs_all_events`
    on_clear         the rank is about to lose its copies
    on_rank_removed  the rank, which is cleared, leaves
    erase_gone       blocks have left the index by an eviction

Plain events reach the block store in kernels, which tell nobody. An annotation that has to see all
of them says so by `needs_all_events`; while any does, the index applies events one by one. An
annotation that says so only while it has entries costs nothing in a fleet that does not use it.

Speculative blocks (kvplug/index/expiring.py) are no annotation. They are blocks that a rank does
not hold yet, so they lengthen prefixes: the kernels of queries read their arrays, and the kernels
that store blocks end their entries. A call per event could do neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvplug.events import BlockCopied, BlockStored, EngineHash, Tier
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_store import BlockStore, HashSpaceArrays
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.packed import PackedStored

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

Stored = BlockStored | BlockCopied | PackedStored
"""Events after which a rank has one more copy of blocks."""


class NamesBlocks(Protocol):
    """An event that names blocks by their engine hashes and nothing of their content."""

    @property
    def block_hashes(self) -> tuple[EngineHash, ...]:
        """In any order."""


class EventBlocks(NamedTuple):
    """Blocks of one rank that an event names, each one known.

    engine_hashes, hashes: uint64[n], the engine's hash and the sequence hash of each; hash_space:
    the arrays of the rank's hash space, to be called before each use, as arrays are replaced.
    """

    rank_number: int
    engine_hashes: U64
    hashes: U64
    hash_space: Callable[[], HashSpaceArrays]

    def only(self, chosen: Mask) -> EventBlocks:
        """Those where chosen, bool[n], is true."""
        return EventBlocks(
            self.rank_number, self.engine_hashes[chosen], self.hashes[chosen], self.hash_space
        )


class AnnotationState(NamedTuple):
    """What a snapshot keeps of an annotation.

    settings: what msgspec writes as JSON, and plain JSON when it is loaded; arrays: uint64[n].
    """

    settings: object
    arrays: dict[str, U64]


class BlockAnnotation(ABC):
    """Every method does nothing unless an annotation says otherwise, but for `save` and `load`.

    name: in snapshots, where `array_names` are those of its state; event_type: of the events that
    are this annotation's alone, if there are any.
    """

    name: ClassVar[str]
    event_type: ClassVar[type[NamesBlocks] | None] = None
    array_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, numbers: HolderNumbers, block_store: BlockStore) -> None:
        self._numbers, self._block_store = numbers, block_store

    @property
    def needs_all_events(self) -> bool:
        """Whether kernels may not apply events now; asked after each call of a method below."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of memory of tables and arrays."""
        return 0

    def shrink(self) -> bool:
        """Give memory back that is not needed; False if there is not much of it."""
        return False

    def concerns(self, event: Stored) -> bool:
        """Whether `on_stored` wants an event; cheap, as it is asked for each one."""
        return False

    def on_stored(self, blocks: EventBlocks, event: Stored, applied: ApplyResult) -> None:
        """The rank has one more copy of each block, in the tier of the event.

        `applied` counts them already; it takes corrections and refusals.
        """

    def on_event(self, blocks: EventBlocks, event: NamesBlocks, applied: ApplyResult) -> None:
        """An event of `event_type`; blocks that it names twice, or that nobody knows, are left out.

        It may take copies from the rank: the other annotations hear of it by `on_removed`.
        """

    def on_removed(self, blocks: EventBlocks) -> None:
        """The rank may have fewer copies of these blocks, or none any more."""

    def on_clear(self, rank_number: int, tier: Tier | None) -> None:
        """The rank is about to lose its copies in the tier, or all of them and those in pools."""

    def on_rank_removed(self, rank_number: int) -> None:
        """The rank, which is cleared, leaves; another one may get its number."""

    def erase_gone(self) -> None:
        """Any copy of any block may have gone, as blocks were evicted from the index."""

    def check(self) -> None:
        """Every invariant; raises IndexCorruptError with the broken one."""

    @abstractmethod
    def save(self) -> AnnotationState:
        """The state; nothing may change before the arrays are written."""

    @abstractmethod
    def load(self, state: AnnotationState) -> None:
        """Become what `save` said, as the only change ever; holders and blocks are loaded.

        Arrays have their names and dtype. Raises msgspec.ValidationError or IndexCorruptError for
        what is not sound; `check` runs later.
        """
