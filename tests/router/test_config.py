import pytest

from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"block_size": 0}, "block_size must be in"),
        ({"mode": "magic"}, "mode must be one of kv, round_robin; got 'magic'"),
        ({"overlap_score_weight": -1}, "overlap_score_weight must be a finite number"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"speculative_ttl_s": float("inf")}, "speculative_ttl_s must be a finite number"),
        ({"request_expiry_s": 0}, "request_expiry_s must be above 0"),
        ({"approximate_ttl_s": 0}, "approximate_ttl_s must be above 0"),
        ({"approximate_ttl_s": float("nan")}, "approximate_ttl_s must be above 0"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RouterConfig(**setting)
