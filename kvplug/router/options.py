"""What a caller may say of a request besides its prompt: one definition for all ways to route.

In:  keyword arguments.   Out: RequestOptions, checked; ConfigError says what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final, TypedDict

import msgspec

from kvplug.errors import ConfigError
from kvplug.events import MAX_DP_SIZE, MoeLabel
from kvplug.setting import WEIGHT, Limits, finite, shown, whole

MAX_TOKENS: Final = 10_000_000
"""Of a prompt or an answer: far more than any engine takes, and what the fitted models can bear."""


class MoeQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The expert that a request will use, as an engine labels its blocks (`MoeLabel`).

    fallback_to_unlabeled: False leaves only the ranks that hold a labelled block of the prompt.
    """

    layer: int
    expert: int
    group: int = 0
    fallback_to_unlabeled: bool = True

    @property
    def label(self) -> MoeLabel:
        """What blocks of this expert carry."""
        return MoeLabel(self.layer, self.expert, self.group)


class RouterConfigOverride(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for one request, instead of those of the RouterConfig.

    overlap_score_weight: as the setting, it selects the cost in blocks; router_temperature: as
    `temperature`; moe_query: prefer ranks whose blocks carry a label.
    """

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    moe_query: MoeQuery | None = None


class RouteOptions(TypedDict, total=False):
    """The keyword arguments; docs/api.md explains them, and RequestOptions has their defaults."""

    model: str
    workers: Collection[str] | None
    worker: str
    dp_rank: int | None
    required_taints: Collection[str]
    preferred_taints: Mapping[str, float]
    session: str
    override: RouterConfigOverride | None
    max_tokens: int | None
    reports_first_token: bool
    num_ranked: int


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """As RouteOptions, with defaults that leave everything to the router."""

    model: str = ""
    workers: Collection[str] | None = None
    worker: str = ""
    dp_rank: int | None = None
    required_taints: Collection[str] = ()
    preferred_taints: Mapping[str, float] | None = None
    session: str = ""
    override: RouterConfigOverride | None = None
    max_tokens: int | None = None
    reports_first_token: bool = True
    num_ranked: int = 0

    @property
    def max_answer_tokens(self) -> float:
        """Tokens at most; ConfigError if that is no number of tokens."""
        if self.max_tokens is None:
            return math.inf
        if type(self.max_tokens) is int and 0 <= self.max_tokens <= MAX_TOKENS:  # the usual case
            return float(self.max_tokens)
        limit = checked_num_tokens(self.max_tokens, "max_tokens", "route a request", math.inf)
        return float(min(limit, MAX_TOKENS))


NO_OPTIONS: Final = RequestOptions()
_OPTIONS: Final = frozenset(RouteOptions.__annotations__)


def checked_num_tokens(
    value: object, name: str, attempt: str, most: float = float(MAX_TOKENS)
) -> int:
    """A number of tokens that a caller gave; ConfigError if it cannot be one."""
    number = whole(value)
    if not 0 <= finite(number) <= most:
        bounds = f"0 to {most:,.0f}" if math.isfinite(most) else "0 or more"
        expected = f"expected {name} to be a whole number of tokens, {bounds}"
        raise ConfigError(f"cannot {attempt}: {expected}, got {shown(value)}")
    return int(number)


_NAME = Limits("a name", lambda value: isinstance(value, str))
_DP_RANK = Limits(
    f"a whole number in [0, {MAX_DP_SIZE - 1}]", lambda value: 0 <= whole(value) < MAX_DP_SIZE
)
_SWITCH = Limits("True or False", lambda value: isinstance(value, bool))
_COUNT = Limits("a whole number of at least 0", lambda value: whole(value) >= 0)


def options_of(given: RouteOptions) -> RequestOptions:
    """Checked but for what decider and constraints check, as that needs the fleet."""
    if not given:
        return NO_OPTIONS
    if unknown := given.keys() - _OPTIONS:
        known = ", ".join(sorted(_OPTIONS))
        raise TypeError(f"there is no option {sorted(unknown)[0]!r}; options are {known}")
    options = RequestOptions(**given)
    for name in ("model", "worker", "session"):
        if type(getattr(options, name)) is not str:
            _require(_NAME, **{name: getattr(options, name)})
    if options.dp_rank is not None:
        _require(_DP_RANK, dp_rank=options.dp_rank)
    _require(_SWITCH, reports_first_token=options.reports_first_token)
    if options.num_ranked != 0 or type(options.num_ranked) is not int:
        _require(_COUNT, num_ranked=options.num_ranked)
    if options.override is not None:
        _check_override(options.override)
    return options


def _check_override(override: object) -> None:
    if not isinstance(override, RouterConfigOverride):
        raise ConfigError(f"override must be a RouterConfigOverride, got {shown(override)}")
    for name in ("overlap_score_weight", "router_temperature"):
        if getattr(override, name) is not None:
            _require(WEIGHT, **{name: getattr(override, name)})
    query = override.moe_query
    if query is None:
        return
    if not isinstance(query, MoeQuery):
        raise ConfigError(f"moe_query must be a MoeQuery, got {shown(query)}")
    _require(_COUNT, layer=query.layer, expert=query.expert, group=query.group)
    _require(_SWITCH, fallback_to_unlabeled=query.fallback_to_unlabeled)


def _require(limits: Limits, **values: object) -> None:
    for name, value in values.items():
        if not limits.fits(value):
            raise ConfigError(f"{name} must be {limits.expected}, got {shown(value)}")
