"""RouterConfig: the settings of an in-process router, checked once.

In:  numbers and names.   Out: a frozen object, or a ConfigError that says what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvplug.errors import ConfigError
from kvplug.events import MAX_BLOCK_SIZE
from kvplug.index.bounds import Bounds
from kvplug.setting import (
    AT_LEAST_0,
    FINITE_ABOVE_0,
    SHARE,
    SWITCH,
    Limits,
    check_settings,
    count,
    finite,
    setting,
    whole,
)

Mode = Literal["kv", "round_robin"]
Cost = Literal["ms", "blocks"]

_BLOCK_SIZE = Limits(
    f"in [1, {MAX_BLOCK_SIZE}] and a whole number",
    lambda value: value is None or 1 <= whole(value) <= MAX_BLOCK_SIZE,
)
_SLO = Limits("a number above 0, or None", lambda value: value is None or finite(value) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are routed."""

    block_size: int | None = setting(
        None,
        "tokens per block of workers that name none of their own. By default a worker has the "
        "size of the first blocks that it stores; blocks of another size are refused, named in "
        "the log and counted as `block_size`",
        limits=_BLOCK_SIZE,
        flag="--block-size",
        default_text="from the events",
    )
    mode: Mode = setting(
        "kv",
        "`kv`: by cached prefix and load; `round_robin`: by turns",
        flag="--router-mode, --mode",
    )
    cost: Cost | None = setting(
        None,
        "`ms`: what a choice costs the fleet in milliseconds ([routing](routing.md)); `blocks`:"
        " blocks to prefill and to decode, weighted. A weight alone selects `blocks`",
        limits=Limits(
            f"one of {', '.join(get_args(Cost))}, or None",
            lambda value: value in (None, *get_args(Cost)),
        ),
        flag="--cost",
        default_text="ms",
    )
    overlap_score_weight: float | None = setting(
        None,
        "go by the cost in blocks: what a block to prefill costs in blocks to decode. Higher "
        "favours the cache (TTFT), 0 is pure load balancing",
        limits=AT_LEAST_0.or_none,
        flag="--kv-overlap-score-weight",
    )
    ttft_slo_ms: float | None = setting(
        None,
        "a worker that is predicted to take longer to the first token gets the request only if "
        "all are",
        limits=_SLO,
        flag="--ttft-slo-ms",
    )
    itl_slo_ms: float | None = setting(
        None,
        "the same for the time between two tokens of an answer",
        limits=_SLO,
        flag="--itl-slo-ms",
    )
    temperature: float = setting(
        0.0,
        "0 takes the lowest cost; above 0, softmax over costs rescaled to [0, 1]",
        limits=AT_LEAST_0,
        flag="--router-temperature",
    )
    speculative_ttl_s: float = setting(
        2.0,
        "how long a routed prompt counts as cached until the engine says so; 0 is off",
        limits=AT_LEAST_0,
        flag="--speculative-ttl-s",
    )
    use_kv_events: bool = setting(
        True,
        "the approximate mode ([how](how-it-works.md#without-events)), for engines without KV "
        "events: none is received, `events=`, `replay=`, `topic=` and `--events-bind` are not "
        "used, and a routed prompt counts as cached where it went. Name the engines' "
        "`--block-size`: without events it is 16",
        limits=SWITCH,
        flag="--no-kv-events",
        default_text="off",
    )
    approximate_ttl_s: float = setting(
        120.0,
        "with `--no-kv-events`: for how long, after the last request that had it",
        limits=FINITE_ABOVE_0,
        flag="--approximate-ttl-s",
    )
    stale_confidence: float = setting(
        0.5,
        "what the blocks of a worker count for while some of its events are missing, 0 to 1, "
        "until the [audit](audit.md) has measured it",
        limits=SHARE,
        flag="--stale-confidence",
    )
    max_index_blocks: int | None = setting(
        None,
        "distinct blocks that each index (one per model and block size) holds at most; past it "
        "the tails of prefixes that were used longest ago go",
        flag="--max-index-blocks",
        parse=count,
    )
    max_index_bytes: int | None = setting(
        None,
        "memory that the tables of each index take at most; a table that grows needs its new "
        "and its old memory for a moment, and buffers as large as the largest event come on top",
        flag="--max-index-bytes",
        parse=count,
    )
    request_expiry_s: float = setting(
        600.0,
        "a request that is neither finished nor renewed stops counting as load after this "
        "time; the standalone router does both",
        limits=FINITE_ABOVE_0,
        flag="--request-expiry-s",
    )

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}; got {self.mode!r}")
        check_settings(self)
        _ = self.bounds  # checks itself
        if self.cost == "ms" and self.overlap_score_weight is not None:
            raise ConfigError(
                "overlap_score_weight is a weight of the cost in blocks, got "
                f"{self.overlap_score_weight} with cost='ms'"
            )

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
