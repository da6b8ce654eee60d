"""FollowedFleet: the workers of a Router, and what their events say.

In:  workers, their event batches, what is known of their engines.
Out: an index, cache sizes and speeds that decisions go by (kvplug/router/core.py).

A lock makes it safe to apply events in one thread and route in another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Unpack

from msgspec import structs

from kvplug.errors import ConfigError
from kvplug.events import EventBatch, Rank
from kvplug.hashing import checked_block_size
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex
from kvplug.index.packed_run import PackedRun
from kvplug.records import Records
from kvplug.router.arguments import (
    checked_batch,
    checked_instance,
    checked_pools,
    checked_rank,
    checked_worker,
)
from kvplug.router.bookings import Bookings
from kvplug.router.cache_sizes import CacheSize, CacheSizes
from kvplug.router.config import RouterConfig
from kvplug.router.constraints import checked_names
from kvplug.router.decider import Decider
from kvplug.router.engine_model import EngineModel
from kvplug.router.engine_speeds import EngineSpeeds, ModelQuality
from kvplug.router.fleet_index import NOMINAL_BLOCK_SIZE, FleetIndex, FleetOptions
from kvplug.router.index_group import Blocks
from kvplug.router.load import ActiveLoad
from kvplug.router.observer import (
    Arrival,
    RouterObserver,
    run_of_events,
    run_of_packed,
    run_of_records,
)
from kvplug.router.query_first_lock import QueryFirstLock
from kvplug.router.reported_load import ReportedLoad
from kvplug.setting import SHARE, shown

# Of ingestion in one piece. A query that comes meanwhile waits for the event at hand only.
BLOCKS_PER_SLICE = 2048
_SLOTS_PER_SLICE = 1024
_EVENTS_PER_SLICE = 64


class FollowedFleet:
    """add_worker, apply, clear, remove_worker; what is told of engines.

    Events and clears of a rank that is not in the fleet are refused and counted, as its engine may
    speak on after it was removed. To ask or to set something of it raises UnknownRankError.

    `fleet_index` and `load` may be read for inspection, while no other thread is at work or within
    `locked`. One observer is told of decisions and events (kvplug/router/observer.py).
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_: random.Random | None = None,
    ) -> None:
        self.config = RouterConfig()
        if config is not None:
            self.config = checked_instance(config, RouterConfig, "the configuration")
        self._lock = QueryFirstLock()
        self.fleet_index = self._new_fleet_index(
            block_size=self._block_size(),
            speculative_ttl_s=self.config.routed_ttl_s,
            query_waiting=self._lock.query_waiting,
            bounds=self.config.bounds,
            tier_credits=self.config.tier_credits,
        )
        self.load = ActiveLoad(
            self.config.request_expiry_s, counts_sent=not self.config.use_kv_events
        )
        self.cache_sizes = CacheSizes(self.fleet_index, self.load)
        self._speeds = EngineSpeeds(self.fleet_index, self.load, self.config.loading_credits)
        self._decider = Decider(self.config, self.fleet_index, self.load, random_)
        self._bookings = Bookings(self._decider, self.fleet_index, self.load)
        self._clock = clock
        self._observer = RouterObserver()

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that can be chosen."""
        return [rank for rank in self.fleet_index.numbers.ranks if rank is not None]

    @property
    def index(self) -> BlockIndex:
        """The index of a fleet with one model and one block size; ConfigError if it has more."""
        only = self.fleet_index.only
        if only is None:
            raise ConfigError("the fleet has several indexes: ask index_of(rank)")
        return only.index

    @property
    def clock(self) -> Callable[[], float]:
        """What tells it the time, in seconds."""
        return self._clock

    def locked(self) -> AbstractContextManager[None]:
        """Within it nothing is routed, applied or changed: for a short look at several things.

        `ranks`, `index_of`, `fleet_index` and `load` can be read then; a method that changes or
        decides something would wait for ever.
        """
        return self._lock

    def set_observer(self, observer: RouterObserver) -> None:
        """Tell it of decisions and applied events from now on, instead of the one before."""
        checked_instance(observer, RouterObserver, "an observer")
        with self._lock.low_priority:
            self._observer = observer
            self._decider.on_decision = observer.on_decision

    def index_of(self, rank: Rank) -> BlockIndex:
        """The index of the rank's model and block size; UnknownRankError for no member."""
        self.fleet_index.numbers.number_of(rank)
        return self.fleet_index.group_of(rank).index

    def add_worker(
        self,
        worker: str,
        *,
        dp_size: int = 1,
        model: str = "",
        block_size: int | None = None,
        taints: Collection[str] | None = None,
    ) -> None:
        """Route to this worker from now on; it has `dp_size` data-parallel ranks.

        `taints`: names that requests may require or prefer (kvplug/router/constraints.py).

        Without a `block_size` of its own it has the one of the config, and without that the one of
        the first blocks that it stores. Called again, it adds to what is known of the worker;
        `taints` replace those that it had.
        """
        checked_worker(worker)
        checked = None if taints is None else checked_names(taints, "taints")
        with self._lock.low_priority:  # not within a run of events: a worker may change its index
            self.fleet_index.add_worker(worker, dp_size, model, block_size)
            if checked is not None:
                self.fleet_index.set_taints(worker, checked)
            self._fleet_changed()

    def remove_worker(self, worker: str) -> None:
        """Forget the worker, its blocks and its load; nothing is done for one that is not there."""
        checked_worker(worker)
        with self._lock.low_priority:
            for number, rank in enumerate(self.fleet_index.numbers.ranks):
                if rank is not None and rank.worker == worker:
                    self.load.forget(number, self._clock())
                    self._speeds.forget(number)
                    self.cache_sizes.forget(rank)
                    self._observer.on_rank_left(rank)
            self.fleet_index.remove_worker(worker)
            self._fleet_changed()

    def apply(self, rank: Rank, batch: EventBatch) -> ApplyResult:
        """Remember what a rank's engine said; returns what was stored, removed and refused.

        A batch that names a data-parallel rank is of that rank of the worker. ConfigError in the
        approximate mode.
        """
        self.require_events(checked_rank(rank))
        rank = rank.named_by(checked_batch(batch).dp_rank)
        arrival, applied = Arrival(rank, batch.ts, self._clock()), ApplyResult()
        run_of = partial(run_of_events, batch.events)
        apply_slice = partial(self._apply_events, rank, batch, applied)
        self._apply_in_slices(arrival, len(batch.events), run_of, apply_slice)
        return applied

    def apply_packed(self, rank: Rank, payload: bytes, *, ts: float = 0.0) -> ApplyResult:
        """As `apply`, for packed events (kvplug/packed.py): blocks that are hashed already; queries
        in other threads go in between.

        Blocks are taken to be as `set_blocks` said, else to have the size of the rank's index. ts:
        when the engine sent them, in seconds, 0 if that is not known. DecodeError, and nothing
        done, for a payload that is none.
        """
        self.require_events(checked_rank(rank))
        run, applied = PackedRun(payload), ApplyResult()
        arrival = Arrival(rank, ts, self._clock())
        run_of = partial(run_of_packed, run)
        apply_slice = partial(self._apply_packed, rank, run, applied)
        self._apply_in_slices(arrival, run.num_events, run_of, apply_slice)
        return applied

    def apply_records(self, rank: Rank, records: Records) -> ApplyResult:
        """As `apply`, for many plain events at once; queries in other threads go in between."""
        self.require_events(rank)
        rank = rank.named_by(records.dp_rank)
        arrival, applied = Arrival(rank, records.ts, self._clock()), ApplyResult()
        run_of = partial(run_of_records, records)
        apply_slice = partial(self._apply_records, rank, records, applied)
        self._apply_in_slices(arrival, records.num_events, run_of, apply_slice)
        return applied

    def set_blocks(self, rank: Rank, block_size: int, *, bigrams: bool = False) -> bool:
        """The packed events of the rank are of such blocks (kvplug/router/index_group.py, Blocks).

        False, and nothing done, if its worker was added with another block size, or holds other
        blocks. ConfigError for what is no block size.
        """
        checked_block_size(block_size)
        with self._lock.low_priority:
            self.fleet_index.numbers.number_of(rank)
            is_possible = self.fleet_index.set_blocks(rank, Blocks(block_size, bigrams))
            self._fleet_changed()
        return is_possible

    def set_cxl_pools(self, worker: str, pool_ids: Collection[int]) -> None:
        """The worker can read these CXL pools, and no others. What is put there by an event that
        names no workers can be read by all that say so; UnknownRankError for an unknown worker.
        """
        checked_worker(worker)
        checked = frozenset(checked_pools(pool_ids))
        with self._lock.low_priority:
            self.fleet_index.numbers.number_of(Rank(worker))
            self.fleet_index.set_cxl_pools(worker, checked)

    def joined_as(self, rank: Rank) -> int:
        """Another number each time that the rank joins the fleet with nothing, 0 while it is not
        in it: for whoever applies events, as all of them are needed again then.
        """
        return self.fleet_index.joined_as(rank.worker)

    def require_events(self, rank: Rank) -> None:
        """ConfigError in the approximate mode, which goes by its own decisions alone, and for a
        weight of 0, with which no index is built.
        """
        if not self.config.needs_index:
            raise ConfigError(
                f"cannot apply events of {rank}: expected a router with an overlap_score_weight "
                "above 0, this one has 0 and builds no index"
            )
        if not self.config.use_kv_events:
            raise ConfigError(
                f"cannot apply events of {rank}: expected a router with use_kv_events=True, "
                "this one has False and goes by its own decisions"
            )

    def set_confidence(self, rank: Rank, confidence: float) -> None:
        """What the rank's blocks count for in costs, 0 to 1; 1 until it is said otherwise.

        For ranks of whose blocks not everything is known (kvplug/ingest/trust.py); 0 for one that
        publishes no events. ConfigError for what is no number in [0, 1].
        """
        if not SHARE.fits(confidence):
            raise ConfigError(f"confidence must be {SHARE.expected}, got {shown(confidence)}")
        with self._lock:
            self.fleet_index.numbers.number_of(rank)
            self.fleet_index.set_confidence(rank, confidence)
            self.cache_sizes.note_confidence(rank)

    def set_recomputed_blocks(self, rank: Rank, num_blocks: int) -> None:
        """The rank's engine computes so many of the last blocks that match anew.

        1 for vLLM with EAGLE or MTP heads, else 0. An audit learns it. ConfigError for anything
        else.
        """
        if num_blocks not in (0, 1):
            raise ConfigError(f"recomputed blocks must be 0 or 1, got {shown(num_blocks)}")
        with self._lock:
            self.fleet_index.numbers.number_of(rank)
            self.fleet_index.set_recomputed(rank, num_blocks)

    def clear(self, rank: Rank) -> int:
        """The rank holds nothing (it restarted, or its events are lost); returns what it had."""
        checked_rank(rank)
        with self._lock.low_priority as turn:
            if rank not in self.fleet_index.numbers:
                return 0
            arrival = Arrival(rank, 0.0, self._clock())
            self._observer.before_removal(rank)
            num_dropped = self._clear_in_slices(rank, turn.yield_to_queries)
            self._observer.after_removal(arrival)
            self._observer.on_clear(rank)
            return num_dropped

    def forget_adapter(self, worker: str, lora_name: str) -> int:
        """The worker has loaded a LoRA adapter again, with other weights; returns how many blocks
        of it its ranks had.

        vLLM never reuses them, if the weights came from another path. An event that stores one of
        them anew has the same effect; until then they would count.
        """
        num_forgotten = 0
        with self._lock.low_priority:
            for rank in self.ranks:
                if rank.worker == worker:
                    num_forgotten += self.fleet_index.forget_adapter(rank, lora_name)
                    self.cache_sizes.note_forgotten(rank)
        return num_forgotten

    def set_cache_capacity(self, rank: Rank, num_blocks: float) -> None:
        """The rank's engine says that its device has room for so many blocks.

        What cannot be is named in the log and ignored: the capacity is learnt then.
        """
        with self._lock:
            self.fleet_index.numbers.number_of(rank)
            self.cache_sizes.say(rank, num_blocks)

    def cache_size(self, rank: Rank) -> CacheSize:
        """How many blocks the rank holds and has room for, and how that is known."""
        with self._lock:
            self.fleet_index.numbers.number_of(rank)
            return self.cache_sizes.of(rank)

    def set_reported_load(
        self,
        rank: Rank,
        *,
        num_running: int | None = None,
        num_waiting: int | None = None,
        waiting_tokens: int | None = None,
        active_blocks: int | None = None,
    ) -> None:
        """What the rank's engine says it is busy with. What exceeds this router's own requests
        there is the load of others, and counts beside them until the next report.

        num_running: requests in its batch; num_waiting: in its queue; waiting_tokens: of prompts,
        to be computed; active_blocks: in use by requests. Where it is None, the router's own count
        stands alone. ConfigError for what is no count, UnknownRankError for a rank that is not in
        the fleet; nothing is done then.
        """
        reported = ReportedLoad(
            num_running=num_running,
            num_waiting=num_waiting,
            waiting_tokens=waiting_tokens,
            active_blocks=active_blocks,
        )
        with self._lock:
            number, now_s = self.fleet_index.numbers.number_of(rank), self._now()
            block_size = self.fleet_index.group_of(rank).block_size
            self.load.set_others(number, reported, block_size, now_s)

    def set_engine_model(self, rank: Rank, model: EngineModel) -> None:
        """The rank's engine is so fast; nothing is learnt of it from now on."""
        checked_instance(model, EngineModel, "the model of an engine")
        with self._lock:
            self._speeds.give(self.fleet_index.numbers.number_of(rank), model)

    def engine_model(self, rank: Rank) -> EngineModel:
        """How fast the rank's engine is taken to be."""
        with self._lock:
            return self._speeds.model_of(self.fleet_index.numbers.number_of(rank))

    def model_quality(self, rank: Rank) -> ModelQuality:
        """How good that is: by how many observations, and how far off its predictions are."""
        with self._lock:
            return self._speeds.quality_of(rank)

    def _new_fleet_index(self, **options: Unpack[FleetOptions]) -> FleetIndex:
        return FleetIndex(**options)

    def _block_size(self) -> int | None:
        """Without events nobody would tell the block size."""
        known = self.config.block_size
        return known if known or self.config.follows_events else NOMINAL_BLOCK_SIZE

    def _apply_in_slices(
        self,
        arrival: Arrival,
        num_events: int,
        run_of: Callable[[int], tuple[bool, int]],
        apply_slice: Callable[[int, int], int],
    ) -> None:
        """`apply_slice(first, end)` of some of these events, at most; it returns the next one."""
        rank, at = arrival.rank, 0
        with self._lock.low_priority as turn:
            is_member = rank in self.fleet_index.numbers
            observer = self._observer if is_member else RouterObserver()
            while at < num_events:
                # A block may go and come back within one batch: then the observer looks in between.
                removes, end = run_of(at) if observer.watches(rank) else (False, num_events)
                if removes:
                    observer.before_removal(rank)
                try:
                    at = apply_slice(at, end)
                    while removes and at < end:
                        turn.yield_to_queries()
                        at = apply_slice(at, end)
                finally:  # packed events may turn out to be none
                    if removes:
                        observer.after_removal(arrival)
                turn.yield_to_queries()
            observer.on_applied(arrival)

    def _apply_events(
        self, rank: Rank, batch: EventBatch, applied: ApplyResult, first: int, end: int
    ) -> int:
        end = min(end, first + _EVENTS_PER_SLICE)
        before = self.cache_sizes.num_resident(rank)
        part = self.fleet_index.apply(rank, structs.replace(batch, events=batch.events[first:end]))
        self._note(rank, before, part)
        applied.add(part)
        return end

    def _apply_records(
        self, rank: Rank, records: Records, applied: ApplyResult, first: int, end: int
    ) -> int:
        before, part = self.cache_sizes.num_resident(rank), ApplyResult()
        if end < records.num_events:
            records = replace(records, num_events=end)
        at = self.fleet_index.apply_records(rank, records, first, BLOCKS_PER_SLICE, part)
        self._lock.low_priority.yield_to_queries()  # which need not wait for the counts
        self._note(rank, before, part)
        applied.add(part)
        return at

    def _apply_packed(
        self, rank: Rank, run: PackedRun, applied: ApplyResult, _first: int, end: int
    ) -> int:
        before, part = self.cache_sizes.num_resident(rank), ApplyResult()
        self.fleet_index.apply_packed(rank, run, end, BLOCKS_PER_SLICE, part)
        self._lock.low_priority.yield_to_queries()  # which need not wait for the counts
        self._note(rank, before, part)
        applied.add(part)
        return end if run.is_done else run.next

    def _note(self, rank: Rank, num_before: int, applied: ApplyResult) -> None:
        """Events have changed what the rank has on its device, which had so many blocks."""
        self.cache_sizes.note(rank, num_before, applied)
        if applied.num_stored and self._decider.unreported.are_awaited:
            self._decider.unreported.note_stored(rank, self._clock())

    def _clear_in_slices(self, rank: Rank, yield_to_queries: Callable[[], None]) -> int:
        clearing = self.fleet_index.start_clear(rank)
        while not clearing.is_done:
            clearing.advance(_SLOTS_PER_SLICE)
            yield_to_queries()
        self.fleet_index.end_clear(rank)
        self.cache_sizes.note_clear(rank)
        return clearing.num_dropped

    def _now(self) -> float:
        """The time, once what is due by then has been done to the load."""
        now_s = self._clock()
        self.load.expire(now_s)
        return now_s

    def _fleet_changed(self) -> None:
        self._decider.fleet_changed()
        self._speeds.fleet_changed()
        self.cache_sizes.note_all()
