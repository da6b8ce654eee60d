"""RouterConfig: the knobs of an in-process router, checked once.

In:  numbers and names.   Out: a frozen object, or a ConfigError that says what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvplug.errors import ConfigError
from kvplug.events import MAX_BLOCK_SIZE
from kvplug.index.bounds import Bounds
from kvplug.setting import finite, shown, whole

Mode = Literal["kv", "round_robin"]
Cost = Literal["ms", "blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are routed.

    block_size: tokens per block of workers that are added without one; None takes it from their
    events.
    mode: `kv` goes by cost, `round_robin` by turns.
    cost: `ms`, what a choice costs the fleet in milliseconds; `blocks`, the weighted sum of blocks
    to prefill and to decode. None is `blocks` if a weight is given, else `ms` (docs/routing.md).
    overlap_score_weight: what a block to prefill costs in blocks to decode, 1 if not given; 0 is
    pure load. Of no meaning for the cost in ms, and refused there.
    ttft_slo_ms, itl_slo_ms: a rank that is predicted to miss one is chosen only if all are.
    temperature: 0 takes the lowest cost; above, softmax over costs rescaled to [0, 1].
    speculative_ttl_s: how long a routed prompt counts as cached until the engine says so; 0 is off.
    use_kv_events: False is the approximate mode: events are refused, and a routed prompt counts as
    cached where it went for approximate_ttl_s after the last request that had it.
    stale_worth: what the blocks of a rank count for while some of its events are missing, 0 to 1.
    max_index_blocks, max_index_bytes: bounds of each index (one per model and block size); past
    them the tails of prefixes that were used longest ago go. None is no bound.
    request_expiry_s: a request that nobody finishes stops counting as load after this time.
    """

    block_size: int | None = None
    mode: Mode = "kv"
    cost: Cost | None = None
    overlap_score_weight: float | None = None
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None
    temperature: float = 0.0
    speculative_ttl_s: float = 2.0
    use_kv_events: bool = True
    approximate_ttl_s: float = 120.0
    stale_worth: float = 0.5
    max_index_blocks: int | None = None
    max_index_bytes: int | None = None
    request_expiry_s: float = 600.0

    def __post_init__(self) -> None:
        if self.block_size is not None:
            fits = 1 <= whole(self.block_size) <= MAX_BLOCK_SIZE
            self._require(fits, "block_size", f"in [1, {MAX_BLOCK_SIZE}] and a whole number")
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}; got {self.mode!r}")
        for name in ("temperature", "speculative_ttl_s"):
            fits = finite(getattr(self, name)) >= 0
            self._require(fits, name, "a finite number of at least 0")
        self._require_cost()
        self._require(isinstance(self.use_kv_events, bool), "use_kv_events", "True or False")
        _ = self.bounds  # checks itself
        self._require(0 <= finite(self.stale_worth) <= 1, "stale_worth", "a number in [0, 1]")
        # No end would be a leak: what nobody finishes or renews has to go some day.
        for name in ("request_expiry_s", "approximate_ttl_s"):
            self._require(finite(getattr(self, name)) > 0, name, "a finite number above 0")

    def _require_cost(self) -> None:
        fits = self.cost in (None, *get_args(Cost))
        self._require(fits, "cost", f"one of {', '.join(get_args(Cost))}, or None")
        weight = self.overlap_score_weight
        fits = weight is None or finite(weight) >= 0
        self._require(fits, "overlap_score_weight", "a finite number of at least 0, or None")
        if self.cost == "ms" and weight is not None:
            raise ConfigError(
                f"overlap_score_weight is a weight of the cost in blocks, got {weight} with "
                "cost='ms'"
            )
        for name in ("ttft_slo_ms", "itl_slo_ms"):
            limit = getattr(self, name)
            self._require(limit is None or finite(limit) > 0, name, "a number above 0, or None")

    def _require(self, fits: bool, name: str, expected: str) -> None:
        if not fits:
            raise ConfigError(f"{name} must be {expected}, got {shown(getattr(self, name))}")

    @property
    def is_cost_in_ms(self) -> bool:
        """Whether costs are in milliseconds."""
        return self.overlap_score_weight is None if self.cost is None else self.cost == "ms"

    @property
    def weight(self) -> float:
        """What a block to prefill costs in blocks to decode."""
        return 1.0 if self.overlap_score_weight is None else self.overlap_score_weight

    @property
    def bounds(self) -> Bounds:
        """Of each index; ConfigError for senseless ones."""
        return Bounds(max_blocks=self.max_index_blocks, max_bytes=self.max_index_bytes)

    @property
    def routed_ttl_s(self) -> float:
        """How long a routed prompt counts as cached, in the mode that is on."""
        return self.speculative_ttl_s if self.use_kv_events else self.approximate_ttl_s
