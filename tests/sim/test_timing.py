"""How long a step takes."""

import pytest

from kvplug.errors import ConfigError
from kvplug.sim.timing import TimeModel

MODEL = TimeModel(
    prefill_tokens_per_s=1000.0,
    decode_base_s=0.010,
    decode_per_sequence_s=0.001,
    step_overhead_s=0.002,
)


@pytest.mark.parametrize(
    ("num_prefill_tokens", "num_decodes", "expected_s"),
    [(0, 0, 0.002), (500, 0, 0.502), (0, 1, 0.013), (0, 8, 0.020), (500, 8, 0.520)],
)
def test_a_step_is_the_sum_of_its_parts(num_prefill_tokens, num_decodes, expected_s):
    step_s = MODEL.step_s(num_prefill_tokens=num_prefill_tokens, num_decodes=num_decodes)
    assert step_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill_tokens_per_s", 0.0), ("decode_base_s", -1.0), ("step_overhead_s", float("nan"))],
)
def test_values_that_are_no_times_are_rejected(field, value):
    with pytest.raises(ConfigError, match=field):
        TimeModel(**{field: value})
