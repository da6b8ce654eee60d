"""RouterConfig: the settings of an in-process router, checked once.

In:  numbers and names.   Out: a frozen object, or a ConfigError that says what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvplug.errors import ConfigError
from kvplug.events import MAX_BLOCK_SIZE
from kvplug.index.bounds import Bounds
from kvplug.index.prefix_query import TierCredits
from kvplug.setting import (
    ABOVE_0,
    AT_LEAST_0,
    FINITE_ABOVE_0,
    SHARE,
    SWITCH,
    WEIGHT,
    Limits,
    check_settings,
    count,
    finite,
    setting,
    whole,
)

Mode = Literal[
    "kv", "random", "round_robin", "direct", "least_loaded", "power_of_two", "rendezvous_hash"
]
Cost = Literal["ms", "blocks"]

_BLOCK_SIZE = Limits(
    f"in [1, {MAX_BLOCK_SIZE}] and a whole number",
    lambda value: value is None or 1 <= whole(value) <= MAX_BLOCK_SIZE,
)
_COUNT = Limits("a whole number of at least 0", lambda value: whole(value) >= 0)
_SLO = Limits("a number above 0, or None", lambda value: value is None or finite(value) > 0)


def _mode(text: str) -> str:
    """Dynamo writes round-robin; what is none is refused by RouterConfig."""
    return text.replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are routed."""

    block_size: int | None = setting(
        None,
        "tokens per block, for workers without a `block_size` of their own. By default the size "
        "of the first blocks that the worker stores. Blocks of another size are refused, logged "
        "and counted as `block_size`",
        limits=_BLOCK_SIZE,
        flag="--block-size, --kv-cache-block-size",
        default_text="from the events",
    )
    mode: Mode = setting(
        "kv",
        "`kv`: by cached prefix and load; `least_loaded`: the fewest requests in flight; "
        "`power_of_two`: the less loaded of two random workers; `rendezvous_hash`: one worker for "
        "all requests of a session; `direct`: the worker that the request names; "
        "`round_robin`: in turn; `random` ([what each is for](routing.md#router-modes))",
        flag="--router-mode, --mode",
        parse=_mode,
    )
    cost: Cost | None = setting(
        None,
        "`ms`: what a choice costs the fleet in milliseconds ([routing](routing.md)); `blocks`:"
        " blocks to prefill and to decode, weighted. `--kv-overlap-score-weight` alone selects"
        " `blocks`",
        limits=Limits(
            f"one of {', '.join(get_args(Cost))}, or None",
            lambda value: value in (None, *get_args(Cost)),
        ),
        flag="--cost",
        default_text="ms",
    )
    overlap_score_weight: float | None = setting(
        None,
        "use the cost in blocks, where a block to prefill costs as much as this many blocks to "
        "decode. A higher weight favours the cache (TTFT), 0 is pure load balancing",
        limits=WEIGHT.or_none,
        flag="--kv-overlap-score-weight, --router-kv-overlap-score-weight",
    )
    host_credit: float | None = setting(
        None,
        "value of a block in a worker's host memory, 0 to 1, relative to one on its device. By "
        "default the cost in milliseconds counts the time to load it, and the cost in blocks "
        "uses 0.75",
        limits=SHARE.or_none,
        flag="--host-credit, --router-host-cache-hit-weight",
    )
    disk_credit: float | None = setting(
        None,
        "the same for a block on disk; 0.25 in the cost in blocks",
        limits=SHARE.or_none,
        flag="--disk-credit, --router-disk-cache-hit-weight",
    )
    cxl_credit: float | None = setting(
        None,
        "the same for a block in a CXL pool that the worker can read; 0.9 in the cost in blocks",
        limits=SHARE.or_none,
        flag="--cxl-credit",
    )
    device_credit: float = setting(
        1.0,
        "value of a block on the device, 0 to 1; below 1, load weighs more against the cache",
        limits=SHARE,
        flag="--device-credit, --router-kv-overlap-score-credit",
    )
    device_credit_decay: float = setting(
        0.0,
        "how fast that value falls on a worker with more queued prefill than others: "
        "`device_credit` is divided by 1 + this * queued prompts of this length",
        limits=WEIGHT,
        flag="--device-credit-decay, --router-kv-overlap-score-credit-decay",
    )
    request_weight: float = setting(
        0.0,
        "what each request in flight on a worker adds to its cost, in blocks",
        limits=WEIGHT,
        flag="--request-weight, --router-decode-active-request-weight",
    )
    moe_boost: float = setting(
        1.0,
        "extra value, in blocks, of a block with the expert label of a request's `moe_query` "
        "([MoE](routing.md#moe-labels))",
        limits=WEIGHT,
        flag="--moe-boost",
    )
    active_decode_blocks_threshold: float | None = setting(
        None,
        "a worker is busy, and gets no requests, while the blocks of its requests in flight take "
        "a larger share of its cache than this",
        limits=ABOVE_0.or_none,
        flag="--active-decode-blocks-threshold",
    )
    active_prefill_tokens_threshold: int | None = setting(
        None,
        "a worker is busy, too, while it still has to prefill more tokens than this",
        limits=_COUNT.or_none,
        flag="--active-prefill-tokens-threshold",
    )
    ttft_slo_ms: float | None = setting(
        None,
        "target for the time to first token: a worker that is predicted to miss it gets the "
        "request only if all workers are",
        limits=_SLO,
        flag="--ttft-slo-ms",
    )
    itl_slo_ms: float | None = setting(
        None,
        "the same for the time between two tokens of an answer (inter-token latency)",
        limits=_SLO,
        flag="--itl-slo-ms",
    )
    temperature: float = setting(
        0.0,
        "0: the worker with the lowest cost. Above 0: a random one, by softmax over the costs, "
        "rescaled to [0, 1]",
        limits=WEIGHT,
        flag="--router-temperature",
    )
    speculative_ttl_s: float = setting(
        2.0,
        "how long a routed prompt counts as cached before the engine's event arrives; 0 turns "
        "this off",
        limits=AT_LEAST_0,
        flag="--speculative-ttl-s, --router-predicted-ttl-secs",
    )
    use_kv_events: bool = setting(
        True,
        "approximate mode ([how](how-it-works.md#without-events)), for engines without KV "
        "events: a routed prompt counts as cached where it went. `events=`, `replay=`, `topic=` "
        "and `--events-bind` are ignored. Set `--block-size` to that of the engines; the router "
        "cannot learn it without events, and assumes 16",
        limits=SWITCH,
        flag="--no-kv-events, --no-router-kv-events",
        default_text="off",
    )
    approximate_ttl_s: float = setting(
        120.0,
        "with `--no-kv-events`: how long a prompt counts as cached after the last request with it",
        limits=FINITE_ABOVE_0,
        flag="--approximate-ttl-s, --router-ttl-secs",
    )
    stale_confidence: float = setting(
        0.5,
        "confidence in the blocks of a worker while some of its events are missing, 0 to 1, "
        "until the [audit](audit.md) has measured it",
        limits=SHARE,
        flag="--stale-confidence",
    )
    max_index_blocks: int | None = setting(
        None,
        "maximum number of distinct blocks in each index (one per model and block size). Beyond "
        "it, the index drops the tails of the least recently used prefixes",
        flag="--max-index-blocks",
        parse=count,
    )
    max_index_bytes: int | None = setting(
        None,
        "maximum memory for the tables of each index. A growing table briefly needs its old and "
        "its new memory; buffers as large as the largest event come on top",
        flag="--max-index-bytes",
        parse=count,
    )
    request_expiry_s: float = setting(
        600.0,
        "a request that is neither finished nor renewed stops counting as load after this time. "
        "The standalone router does both, but behind nginx it cannot renew",
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
    def weighs_prompts(self) -> bool:
        """Whether a choice depends on what prompts consist of, or how long they are."""
        thresholds = (self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold)
        return self.mode == "kv" or thresholds != (None, None)

    @property
    def needs_index(self) -> bool:
        """Whether prefixes count: not so for the cost in blocks with a weight of 0."""
        return self.is_cost_in_ms or self.weight > 0

    @property
    def follows_events(self) -> bool:
        """Whether what engines say of their caches is of any use."""
        return self.use_kv_events and self.needs_index

    @property
    def loading_credits(self) -> tuple[float | None, float | None, float | None]:
        """Of host memory, disk and pools, as far as they are set."""
        return self.host_credit, self.disk_credit, self.cxl_credit

    @property
    def has_credits(self) -> bool:
        """Whether costs have terms that they do not have by default."""
        return (self.device_credit, self.device_credit_decay, self.request_weight) != (1.0, 0, 0)

    @property
    def tier_credits(self) -> TierCredits:
        """Of blocks that are not on a device, in blocks."""
        pairs = zip(self.loading_credits, TierCredits(), strict=True)
        return TierCredits(*(usual if given is None else given for given, usual in pairs))

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
        if not self.needs_index:
            return 0.0
        return self.speculative_ttl_s if self.use_kv_events else self.approximate_ttl_s
