"""What is compared: settings that kvplug and Dynamo share, in the words of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvplug.events import Tier

_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`settings` of RouterConfig, `environment` of Dynamo.

    `asks`: requests have weights, taints and workers of their own; `leaves_gaps`: of the caches;
    `has_answers`: requests add blocks of answers, half of them with an expected length.
    """

    name: str
    meaning: str
    settings: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[Tier, ...] = (Tier.DEVICE,)
    asks: bool = False
    leaves_gaps: bool = False
    has_answers: bool = False

    @property
    def credits(self) -> tuple[float, float]:
        """Of host memory and disk."""
        return self.settings.get("host_credit", 0.75), self.settings.get("disk_credit", 0.25)

    @property
    def weight(self) -> float:
        """Of a block to prefill."""
        return self.settings.get("overlap_score_weight", 1.0)

    @property
    def temperature(self) -> float:
        """Of the softmax over costs; 0 for the lowest cost."""
        return self.settings.get("temperature", 0.0)

    @property
    def has_tiers(self) -> bool:
        """Whether there is other memory than the device's."""
        return len(self.tiers) > 1

    @property
    def is_plain(self) -> bool:
        """Whether the cost is the weighted sum of potential loads."""
        added = {"device_credit", "device_credit_decay", "request_weight"}
        return added.isdisjoint(self.settings)


PROFILES = (
    Profile(name="defaults", meaning="Dynamo's defaults: weight 1, blocks on devices"),
    Profile(
        name="weight_4",
        meaning="the same with weight 4",
        settings={"overlap_score_weight": 4.0},
        environment={"DYN_ROUTER_PREFILL_LOAD_SCALE": "4"},
    ),
    Profile(
        name="weight_quarter",
        meaning="the same with weight 0.25",
        settings={"overlap_score_weight": 0.25},
        environment={"DYN_ROUTER_PREFILL_LOAD_SCALE": "0.25"},
    ),
    Profile(
        name="temperature",
        meaning="workers drawn by softmax at temperature 0.7, 400 times every 15 states",
        settings={"temperature": 0.7},
        environment={"DYN_ROUTER_TEMPERATURE": "0.7"},
    ),
    Profile(
        name="requests",
        meaning="weights, allowed workers, required and preferred taints of single requests",
        asks=True,
    ),
    Profile(
        name="answers",
        meaning="blocks of answers, of known and of unknown length",
        has_answers=True,
    ),
    Profile(
        name="credits",
        meaning="device credit 0.7, its decay 0.5, 2 blocks for each request in flight",
        settings={"device_credit": 0.7, "device_credit_decay": 0.5, "request_weight": 2.0},
        environment={
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.7",
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "0.5",
            "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": "2.0",
        },
    ),
    Profile(
        name="tiers",
        meaning="blocks in host memory and on disk as well, credits 0.75 and 0.25",
        tiers=_TIERS,
    ),
    Profile(
        name="tier_credits",
        meaning="the same with credits 0.5 and 0.1",
        tiers=_TIERS,
        settings={"host_credit": 0.5, "disk_credit": 0.1},
        environment={
            "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": "0.5",
            "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": "0.1",
        },
    ),
    Profile(
        name="gaps",
        meaning="blocks removed from the middle of prefixes, in any tier, and stored anew",
        tiers=_TIERS,
        leaves_gaps=True,
    ),
)
