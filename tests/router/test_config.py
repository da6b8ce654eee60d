from typing import get_args

import numpy as np
import pytest

from kvplug.errors import ConfigError
from kvplug.router.config import Mode, RouterConfig


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"block_size": 0}, "block_size must be in"),
        ({"mode": "magic"}, f"mode must be one of {', '.join(get_args(Mode))}; got 'magic'"),
        ({"overlap_score_weight": -1}, "overlap_score_weight must be a number in"),
        ({"ttft_slo_ms": 0}, "ttft_slo_ms must be a number above 0"),
        ({"temperature": float("nan")}, "temperature must be a number in"),
        ({"speculative_ttl_s": float("inf")}, "speculative_ttl_s must be a finite number"),
        ({"request_expiry_s": 0}, "request_expiry_s must be a finite number above 0"),
        ({"approximate_ttl_s": 0}, "approximate_ttl_s must be a finite number above 0"),
        ({"approximate_ttl_s": float("nan")}, "approximate_ttl_s must be a finite number above 0"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RouterConfig(**setting)


NO_NUMBERS = [
    ("5", "'5'"),
    ("", "''"),
    (b"5", "b'5'"),
    ([5], "[5]"),
    (1 + 2j, "(1+2j)"),
    (True, "True"),
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (float("-inf"), "-inf"),
    (np.float32("inf"), "np.float32(inf)"),
    pytest.param(10**5000, "a number of thousands of digits", id="huge"),
]
OPTIONAL = {"block_size", "overlap_score_weight", "ttft_slo_ms", "itl_slo_ms"}
EXPECTED = {
    "block_size": "in [1, 65536] and a whole number",
    "overlap_score_weight": "a number in [0, 1e9], or None",
    "ttft_slo_ms": "a number above 0, or None",
    "itl_slo_ms": "a number above 0, or None",
    "temperature": "a number in [0, 1e9]",
    "speculative_ttl_s": "a finite number of at least 0",
    "stale_confidence": "a number in [0, 1]",
    "request_expiry_s": "a finite number above 0",
    "approximate_ttl_s": "a finite number above 0",
}


def require_reason(name, value, sentence):
    with pytest.raises(ConfigError) as rejected:
        RouterConfig(**{name: value})
    assert str(rejected.value) == sentence


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
@pytest.mark.parametrize(("value", "shown"), NO_NUMBERS)
def test_what_is_no_number_is_rejected_with_what_is_one(name, expected, value, shown):
    require_reason(name, value, f"{name} must be {expected}, got {shown}")


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - OPTIONAL))
def test_none_is_no_number(name):
    require_reason(name, None, f"{name} must be {EXPECTED[name]}, got None")


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_none_is_what_the_router_finds_out_itself(name):
    assert getattr(RouterConfig(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("block_size", value) for value in (0, -1, 65537, 1.5, 16.0)),
        *((name, -1) for name in EXPECTED),
        *(("stale_confidence", value) for value in (-0.1, 1.1)),
        *((name, 0.0) for name in ("request_expiry_s", "approximate_ttl_s", "ttft_slo_ms")),
    ],
)
def test_a_number_out_of_range_is_rejected_with_the_range(name, value):
    require_reason(name, value, f"{name} must be {EXPECTED[name]}, got {value}")


@pytest.mark.parametrize("name", ["max_index_blocks", "max_index_bytes"])
@pytest.mark.parametrize("value", ["5", 1.5, float("nan"), float("inf"), True, 2**63])
def test_bounds_that_are_no_counts_are_rejected(name, value):
    of_index = name.replace("index_", "")
    expected = f"{of_index} of an index must be a whole number below 2**63, got {value!r}"
    require_reason(name, value, expected)


@pytest.mark.parametrize("value", [None, "no", 0, 1, 0.0])
def test_a_switch_is_true_or_false(value):
    require_reason("use_kv_events", value, f"use_kv_events must be True or False, got {value!r}")


@pytest.mark.parametrize(
    ("settings", "is_in_ms", "weight"),
    [
        ({}, True, 1.0),
        ({"cost": "ms"}, True, 1.0),
        ({"cost": "blocks"}, False, 1.0),
        ({"overlap_score_weight": 4.0}, False, 4.0),
        ({"cost": "blocks", "overlap_score_weight": 0.0}, False, 0.0),
    ],
)
def test_a_weight_selects_the_cost_in_blocks(settings, is_in_ms, weight):
    config = RouterConfig(**settings)
    assert (config.is_cost_in_ms, config.weight) == (is_in_ms, weight)


def test_what_the_cost_in_ms_has_no_use_for_is_rejected():
    with pytest.raises(ConfigError, match="overlap_score_weight is a weight of the cost in blocks"):
        RouterConfig(cost="ms", overlap_score_weight=1.0)
    require_reason("cost", "tokens", "cost must be one of ms, blocks, or None, got 'tokens'")


def test_numbers_may_be_those_of_numpy():
    config = RouterConfig(
        block_size=np.int64(16),
        overlap_score_weight=np.float32(0.5),
        temperature=np.float64(1),
        stale_confidence=1,
        request_expiry_s=np.int32(1),
        approximate_ttl_s=1e300,
    )
    assert (config.block_size, config.overlap_score_weight) == (16, 0.5)
