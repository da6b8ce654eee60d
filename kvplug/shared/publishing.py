"""WritingRouter: a Router that follows events, and whose indexes other processes read.

In:  events of workers, as for Router; a shared folder.   Out: arrays and pages in the folder.

An array that grows becomes another one as in any index; it is then copied into a new file, which
the index goes on with, and a page says which files there are now: a new generation. The files of
the one before are removed at once, as whoever maps them keeps them.

A writer that takes over from one that died builds its index unseen, while readers go on with the
arrays that there are, if they are whole. It publishes when it holds about as much.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kvplug.errors import SharedMemoryError
from kvplug.events import Rank
from kvplug.index.apply_result import ApplyResult
from kvplug.kernels import costing, versioned
from kvplug.kernels.peer_load import CAPACITY, CONFIDENCE, FACT_WIDTH, RESIDENT
from kvplug.kernels.versioned import FACTS, GENERATION, VERSION
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.index_group import IndexGroup
from kvplug.shared import layout, pages
from kvplug.shared.folder import SharedFolder
from kvplug.shared.pages import Page, PageIndex

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

# Methods of FleetIndex that change what queries read.
CHANGES: Final = (
    "add_worker",
    "remove_worker",
    "apply",
    "apply_packed",
    "apply_records",
    "set_blocks",
    "take_over",
    "forget_adapter",
    "refuse_lower_tiers",
    "end_clear",
    "set_confidence",
    "set_recomputed",
    "set_cxl_pools",
)
_CAUGHT_UP: Final = 0.9  # of the blocks of the writer before


class _Published:
    """Of one group, by name of the array: its file, and the array that the index had then."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.arrays: dict[str, Any] = {}
        self.facts: F64 = np.zeros(0)


class IndexPublisher:
    """`with publisher:` around a change of the indexes; `start` publishing. Not thread-safe."""

    def __init__(self, folder: SharedFolder, fleet_index: FleetIndex) -> None:
        self._folder, self._fleet_index = folder, fleet_index
        self._control = folder.open(layout.CONTROL, writes=True)
        self.generation = int(self._control[GENERATION])
        self.is_live = False
        self._depth = 0
        self._published: dict[IndexGroup, _Published] = {}
        self._seen: object = None
        self._token, self._num_files = token_hex(4), 0
        self._has_failed = False

    def start(self) -> None:
        """From now on readers see the indexes as they are."""
        self.is_live = True
        with self:
            pass
        mine = {name for each in self._published.values() for name in each.files.values()}
        for path in self._folder.path.glob("array.*"):
            if path.name not in mine:  # of the writer before
                self._folder.remove(path.name)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1 and self.is_live:
            versioned.begin_write(self._control)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self.is_live:
            try:
                self._publish()
            except SharedMemoryError as failure:
                # The version stays odd: readers go by load, until there is memory again.
                self._report(failure)
            else:
                versioned.end_write(self._control, np.uint64(self.generation))

    def _report(self, failure: SharedMemoryError) -> None:
        if not self._has_failed:
            logger.error("requests are routed by load alone: %s", failure)
        self._has_failed = True

    def _state(self) -> object:
        """Another one whenever an array or a name has become another one."""
        return tuple(
            (group, group.model, group.index, group.index.block_store.version.count)
            for group in self._fleet_index.groups
        )

    def _publish(self) -> None:
        if self._state() == self._seen:
            return
        before = {name for each in self._published.values() for name in each.files.values()}
        groups = self._fleet_index.groups
        self._published = {group: self._published.get(group, _Published()) for group in groups}
        page = Page([self._page_of(*each) for each in self._published.items()])
        self._folder.write(layout.page_name(self.generation + 1), pages.encode(page))
        self.generation += 1
        after = {name for each in self._published.values() for name in each.files.values()}
        for name in [*(before - after), layout.page_name(self.generation - 2)]:
            self._folder.remove(name)
        self._seen = self._state()

    def _page_of(self, group: IndexGroup, published: _Published) -> PageIndex:
        block_store = group.index.block_store
        table, copies, runs, bits, meta, intern, header = block_store.arrays
        arrays = dict(zip(pages.SHARED_ARRAYS, (table, runs, bits, header), strict=True))
        is_moved = False
        for name, array in arrays.items():
            if published.arrays.get(name) is not array:
                published.files[name], arrays[name] = self._copied(array)
                is_moved = True
        if is_moved:
            table, runs, bits, header = arrays.values()
            block_store.load([table, copies, runs, bits, meta, intern, header])
        published.arrays = arrays
        num_ranks = len(group.index.numbers.ranks)
        if len(published.facts) != FACT_WIDTH * num_ranks:
            words: F64 = np.zeros(FACT_WIDTH * num_ranks)
            published.files["facts"], published.facts = self._copied(words)
        self._put_confidence(group, published)
        files = {name: published.files[name] for name in pages.SHARED_ARRAYS}
        return pages.page_of(group, files, published.files.get("facts", ""))

    def _copied(self, array: npt.NDArray[Any]) -> tuple[str, Any]:
        if not len(array):
            return "", array
        self._num_files += 1
        name = f"array.{self._token}.{self._num_files}"
        words = self._folder.create(name, len(array)).view(array.dtype)
        words[:] = array
        return name, words

    def _put_confidence(self, group: IndexGroup, published: _Published) -> None:
        published.facts[CONFIDENCE::FACT_WIDTH] = group.index.confidence

    def put_facts(self, rank: Rank, load_row: F64) -> None:
        """What the rank holds and has room for, by its row of the load, and what that is worth."""
        group = self._fleet_index.group_of(rank)
        published = self._published.get(group)
        if published is None or rank not in group.index.numbers:
            return
        at = FACT_WIDTH * group.index.numbers.number_of(rank)
        if at < len(published.facts):
            published.facts[at + RESIDENT] = load_row[costing.RESIDENT_BLOCKS]
            published.facts[at + CAPACITY] = load_row[costing.CAPACITY_BLOCKS]
            published.facts[at + CONFIDENCE] = self._fleet_index.confidence_of(rank)
            self._control[FACTS] += np.uint64(1)

    def num_blocks_before(self) -> int:
        """How many blocks the writer before has left; 0 if there was none, or if it died in the
        middle of an event.
        """
        if not self.generation or self._control[VERSION] % 2:
            return 0
        try:
            page = pages.decode(self._folder.read(layout.page_name(self.generation)))
            tables = [self._folder.open(each.arrays["table"]) for each in page.indexes]
        except FileNotFoundError:
            return 0
        return sum(int(table[-2]) for table in tables)


def abandon(folder: SharedFolder) -> None:
    """The writer has died. If it was in the middle of an event, nobody is to wait for its end:
    there is a generation without a page.
    """
    control = folder.open(layout.CONTROL, writes=True)
    if control[VERSION] % 2:
        control[GENERATION] += np.uint64(1)


class WritingRouter(Router):
    """A Router; `publisher` makes its indexes known. Requests are not to be routed by it."""

    def __init__(
        self,
        config: RouterConfig,
        folder: SharedFolder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, clock=clock)
        self.publisher = IndexPublisher(folder, self.fleet_index)
        self._num_blocks_before = self.publisher.num_blocks_before()
        _note_changes(self.fleet_index, self.publisher)

    def catch_up(self, *, is_late: bool) -> bool:
        """Publish if that is due: at once after a writer whose arrays are not whole, else when
        there is about as much as it had, or it is late. Whether it is published.
        """
        publisher = self.publisher
        if not publisher.is_live:
            num_blocks = sum(len(group.index) for group in self.fleet_index.groups)
            if is_late or num_blocks >= _CAUGHT_UP * self._num_blocks_before:
                with self._lock.low_priority:
                    publisher.start()
                    self._put_all_facts()
        return publisher.is_live

    def set_confidence(self, rank: Rank, confidence: float) -> None:
        """As Router."""
        super().set_confidence(rank, confidence)
        self._put_facts(rank)

    def set_cache_capacity(self, rank: Rank, num_blocks: float) -> None:
        """As Router."""
        super().set_cache_capacity(rank, num_blocks)
        self._put_facts(rank)

    def _note(self, rank: Rank, num_before: int, applied: ApplyResult) -> None:
        super()._note(rank, num_before, applied)
        self._put_facts(rank)

    def _clear_in_slices(self, rank: Rank, yield_to_queries: Callable[[], None]) -> int:
        # In one piece: between slices, readers would find blocks whose rank is half gone.
        with self.publisher:
            num_dropped = super()._clear_in_slices(rank, lambda: None)
        self._put_facts(rank)
        return num_dropped

    def _fleet_changed(self) -> None:
        super()._fleet_changed()
        self._put_all_facts()

    def _put_all_facts(self) -> None:
        for rank in self.ranks:
            self._put_facts(rank)

    def _put_facts(self, rank: Rank) -> None:
        if rank in self.fleet_index.numbers:
            row = self.load.ranks[self.fleet_index.numbers.number_of(rank)]
            self.publisher.put_facts(rank, row)


def _note_changes(fleet_index: FleetIndex, publisher: IndexPublisher) -> None:
    for name in CHANGES:
        setattr(fleet_index, name, _within(publisher, getattr(fleet_index, name)))


def _within(publisher: IndexPublisher, method: Callable[P, R]) -> Callable[P, R]:
    def changing(*args: P.args, **options: P.kwargs) -> R:
        with publisher:
            return method(*args, **options)

    return changing
