"""The annotations of an index: which there are, and all of them in one hand.

In:  what happens to blocks of a rank.   Out: each annotation has been told
(kvplug/index/block_annotation.py); their states for a snapshot, by name.

A new annotation is a class and a place in ANNOTATIONS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, IndexCorruptError, SnapshotError
from kvplug.events import Tier
from kvplug.index.apply_result import ApplyResult, RejectReason
from kvplug.index.block_annotation import (
    AnnotationState,
    BlockAnnotation,
    EventBlocks,
    NamesBlocks,
    Stored,
)
from kvplug.index.block_store import BlockStore
from kvplug.index.cxl import CxlBlocks
from kvplug.index.holder_numbers import HolderNumbers
from kvplug.index.moe_labels import MoeLabels
from kvplug.index.snapshot_file import Array

U64 = npt.NDArray[np.uint64]
Kind = TypeVar("Kind", bound=BlockAnnotation)

ANNOTATIONS: tuple[type[BlockAnnotation], ...] = (CxlBlocks, MoeLabels)
"""Those of every index, in the order in which they are told.

CXL states come before labels: they move copies, and a label goes with the last one.
"""


class Annotations:
    """One of each kind: iterate over them, or name a kind in brackets.

    need_all_events: whether one of them does, since one of them was last told something.
    """

    def __init__(
        self,
        kinds: Sequence[type[BlockAnnotation]],
        numbers: HolderNumbers,
        block_store: BlockStore,
    ) -> None:
        """Raises ConfigError for two kinds of one name."""
        self._by_name = {kind.name: kind(numbers, block_store) for kind in kinds}
        if len(self._by_name) < len(kinds):
            names = [kind.name for kind in kinds]
            raise ConfigError(f"annotations of an index must have different names, got {names}")
        self._all = tuple(self._by_name.values())
        self._concerns = tuple(each.concerns for each in self._all)
        self._of_event = {each.event_type: each for each in self._all if each.event_type}
        self._look()

    def __iter__(self) -> Iterator[BlockAnnotation]:
        return iter(self._all)

    def __getitem__(self, kind: type[Kind]) -> Kind:
        """The one of a kind; KeyError if the index has none."""
        found = self._by_name[kind.name]
        assert isinstance(found, kind)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all."""
        return sum([each.nbytes for each in self._all])

    def shrink(self) -> bool:
        """Have one give memory back that it does not need; False if there is not much."""
        return any(each.shrink() for each in self._all)

    def concern(self, event: Stored) -> bool:
        """Whether any of them has something to do with a stored event."""
        for concerns in self._concerns:  # noqa: SIM110 - any() takes a microsecond more per event
            if concerns(event):
                return True
        return False

    def on_stored(self, blocks: EventBlocks, event: Stored, applied: ApplyResult) -> None:
        """The rank has one more copy of each block."""
        for each in self._all:
            if each.concerns(event):
                each.on_stored(blocks, event, applied)
        self._look()

    def on_event(self, blocks: EventBlocks, event: NamesBlocks, applied: ApplyResult) -> None:
        """An event that is one annotation's alone; refused if that is not among them."""
        annotation = self._of_event.get(type(event))
        if annotation is None:
            return applied.reject(RejectReason.NO_ANNOTATION, len(blocks.hashes))
        annotation.on_event(blocks, event, applied)
        return self.on_removed(blocks)

    def on_removed(self, blocks: EventBlocks) -> None:
        """The rank may have fewer copies of these blocks."""
        if self.need_all_events:
            for each in self._all:
                each.on_removed(blocks)
        self._look()

    def on_clear(self, rank_number: int, tier: Tier | None) -> None:
        """The rank is about to lose its copies."""
        for each in self._all:
            each.on_clear(rank_number, tier)
        self._look()

    def on_rank_removed(self, rank_number: int) -> None:
        """The rank, which is cleared, leaves."""
        for each in self._all:
            each.on_rank_removed(rank_number)
        self._look()

    def erase_gone(self) -> None:
        """Blocks have left the index by an eviction."""
        for each in self._all:
            each.erase_gone()
        self._look()

    def check(self) -> None:
        """Every invariant of each; raises IndexCorruptError."""
        for each in self._all:
            each.check()

    def save(self) -> tuple[dict[str, object], dict[str, U64]]:
        """Settings by annotation, and arrays by `annotation.array`."""
        states = {name: each.save() for name, each in self._by_name.items()}
        arrays = {
            f"{name}.{array_name}": array
            for name, state in states.items()
            for array_name, array in state.arrays.items()
        }
        return {name: state.settings for name, state in states.items()}, arrays

    def load(self, settings: Mapping[str, object], arrays: Mapping[str, Array]) -> None:
        """Become what `save` said; one that was not saved yet stays empty.

        Raises SnapshotError if one was that is not here, and whatever BlockAnnotation.load raises.
        """
        if unknown := sorted(settings.keys() - self._by_name.keys()):
            known = sorted(self._by_name)
            raise SnapshotError(f"expected annotations among {known}, got {unknown}")
        saved = [self._by_name[name] for name in settings]
        expected = {f"{each.name}.{name}" for each in saved for name in each.array_names}
        if expected != set(arrays):
            raise IndexCorruptError(f"expected the arrays {sorted(expected)} of annotations")
        for each in saved:
            mine = {name: arrays[f"{each.name}.{name}"] for name in each.array_names}
            each.load(AnnotationState(settings[each.name], mine))
        self._look()

    def _look(self) -> None:
        # Asked here and not for each event: the kernels' way in has one attribute to look at.
        self.need_all_events = False
        for each in self._all:
            if each.needs_all_events:
                self.need_all_events = True
