"""What the routing kernel takes for one index of the fleet: a bundle of arrays, made anew only when
one of them has become another array (kernels/bundle.py).

In:  an IndexGroup, the load of the fleet, the configuration.   Out: the bundle, and scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.index.prefix_query import PrefixQuery
from kvplug.kernels import costing, matching, scoring
from kvplug.kernels.bundle import Bundle
from kvplug.router.config import RouterConfig
from kvplug.router.index_group import IndexGroup
from kvplug.router.load import ActiveLoad

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]


class Adjustment(NamedTuple):
    """What one request wants otherwise: overlap_score_weight and temperature, as the settings, None
    to leave them; factors, float64[ranks], of the costs; bonus, float64[ranks], in blocks.
    """

    weight: float | None = None
    temperature: float | None = None
    factors: F64 | None = None
    bonus: F64 | None = None


class GroupArrays:
    """bundle: as kernels/scoring.py has it; costs, own_ms: of the last request, by rank.

    `traffic`: what requests to this index are like (kernels/costing.py); `adjustment`: what costs
    are now, None: as configured.
    """

    def __init__(self, config: RouterConfig, group: IndexGroup, load: ActiveLoad) -> None:
        self._config, self._group, self._load = config, group, load
        self.traffic: F64 = np.zeros(costing.TRAFFIC_WIDTH)
        self.traffic[costing.GAP_MS] = costing.FIRST_GAP_MS
        self._prefix_query: object = None
        self._seen_version = -1
        self.adjustment: Adjustment | None = None

    def refresh(self, num_ranks: int) -> None:
        """Take notice of arrays that are others now; there are so many ranks in the fleet."""
        prefix_query = self._group.index.prefix_query
        if prefix_query is self._prefix_query and self._seen_version == self._load.version.count:
            return
        self._load.reserve(num_ranks)
        self._prefix_query, self._seen_version = prefix_query, self._load.version.count
        self.costs, self.own_ms = np.full(num_ranks, np.inf), np.full(num_ranks, np.inf)
        numbers = self._group.numbers
        self.traffic[costing.USUAL_CAPACITY] = self._load.usual_capacity(numbers)
        self._bundle = self._collect(num_ranks, prefix_query)
        self.bundle: U64 = self._bundle.words

    @property
    def is_cost_in_ms(self) -> bool:
        """Whether the request at hand is costed in milliseconds."""
        return bool(self._settings[scoring.COST_IN_MS])

    @property
    def depth(self) -> I64:
        """int64[ranks of the fleet]: leading blocks of the last request that each rank has, or is
        expected to have; of ranks in other indexes anything.
        """
        row = self._held.reshape(matching.NUM_ROWS, -1)[matching.DEPTH]
        return np.asarray(row[self._group.index_ranks(len(self.costs))])

    def adjust(self, wanted: Adjustment | None) -> None:
        """Costs are as a request wants them from now on; None: as configured."""
        settings, config = self._settings, self._config
        settings[scoring.COST_IN_MS] = config.is_cost_in_ms
        settings[scoring.OVERLAP_WEIGHT] = config.weight
        settings[scoring.TEMPERATURE] = config.temperature
        settings[scoring.IS_ADJUSTED] = 0.0
        self.adjustment = wanted
        if wanted is not None:
            self._write_adjustment(wanted)

    def _write_adjustment(self, wanted: Adjustment) -> None:
        settings = self._settings
        if wanted.weight is not None:
            settings[scoring.COST_IN_MS], settings[scoring.OVERLAP_WEIGHT] = 0.0, wanted.weight
        if wanted.temperature is not None:
            settings[scoring.TEMPERATURE] = wanted.temperature
        if wanted.factors is not None or wanted.bonus is not None:
            settings[scoring.IS_ADJUSTED] = 1.0
            self._factors[:] = 1.0 if wanted.factors is None else wanted.factors
            self._bonus[:] = 0.0 if wanted.bonus is None else wanted.bonus

    def reserve(self, candidates: I64, num_blocks: int, num_ranks: int) -> None:
        """Make room for a prompt of so many blocks on any of these ranks of the fleet."""
        self._load.reserve(num_ranks, num_blocks)
        highest = int(self._group.index_ranks(num_ranks)[candidates].max())
        if self._group.index.speculative.ttl_s > 0:
            self._group.index.speculative.reserve(highest, num_blocks)
        self.refresh(num_ranks)

    def note_answer(self, num_tokens: int, ms: float) -> None:
        """A request was answered with so many tokens, in so many ms from the first to the last."""
        costing.note_answer(self.traffic, num_tokens, ms)

    def _collect(self, num_ranks: int, prefix_query: PrefixQuery) -> Bundle:
        load, expected = self._load, self._group.index.speculative
        waits, found = np.zeros(num_ranks), np.zeros(3 * num_ranks)
        self._settings = _settings_of(self._config, self._group)
        self._factors, self._bonus = np.ones(num_ranks), np.zeros(num_ranks)
        self.adjustment = None  # that of the request at hand is written again before each call
        self._held = prefix_query.new_rows()
        return Bundle(
            self._settings, prefix_query.bundle, self._held,
            load.ranks.reshape(-1), self.traffic,
            self._group.index_ranks(num_ranks), self.costs, self.own_ms, waits, found,
            load.active.slots, *load.forecast.arrays, load.popular_keys, load.popular_counts,
            *expected.arrays, self._factors, self._bonus,
        )  # fmt: skip


def _settings_of(config: RouterConfig, group: IndexGroup) -> F64:
    # Not once for all: a group that learns its block size gets another index.
    settings, expected = np.zeros(scoring.NUM_SETTINGS), group.index.speculative
    settings[scoring.BLOCK_SIZE] = group.block_size
    settings[scoring.COST_IN_MS] = settings[scoring.KEEPS_FORECAST] = config.is_cost_in_ms
    settings[scoring.OVERLAP_WEIGHT], settings[scoring.TEMPERATURE] = (
        config.weight,
        config.temperature,
    )
    settings[scoring.HAS_CREDITS] = config.has_credits
    settings[scoring.DEVICE_CREDIT] = config.device_credit
    settings[scoring.CREDIT_DECAY] = config.device_credit_decay
    settings[scoring.REQUEST_WEIGHT] = config.request_weight
    settings[scoring.EXPECTED_TTL_S] = expected.ttl_s
    settings[scoring.USES_EVENTS] = config.use_kv_events
    settings[scoring.TTFT_OBJECTIVE_MS] = config.ttft_slo_ms or 0.0
    settings[scoring.ITL_OBJECTIVE_MS] = config.itl_slo_ms or 0.0
    settings[scoring.MAX_EXPECTED] = expected.capacity
    settings[scoring.MAX_MORE_EXPIRED] = expected.max_more_expired
    return settings
