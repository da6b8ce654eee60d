import numpy as np
import pytest

from kvplug.errors import ConfigError
from kvplug.index.bounds import Bounds


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("max_blocks", 0, 1),
        ("max_blocks", -1, 1),
        ("max_blocks", -(2**70), 1),
        ("max_bytes", 2**18 - 1, 2**18),
        ("max_bytes", 0, 2**18),
        ("max_bytes", -1, 2**18),
    ],
)
def test_too_little_is_rejected_with_what_is_enough(name, value, least):
    with pytest.raises(ConfigError) as rejected:
        Bounds(**{name: value})
    assert str(rejected.value) == f"{name} of an index must be at least {least}, got {value}"


NO_COUNTS = [
    ("5", "'5'"),
    ("", "''"),
    ("None", "'None'"),
    (b"5", "b'5'"),
    ([], "[]"),
    (1.5, "1.5"),
    (1e6, "1000000.0"),
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (float("-inf"), "-inf"),
    (True, "True"),
    (False, "False"),
    (2**63, "9223372036854775808"),
    (np.uint64(2**63), "np.uint64(9223372036854775808)"),
    pytest.param(10**5000, "a number of thousands of digits", id="huge"),
    (np.ones((2, 2)), "array([[1., 1... [1., 1.]])"),
]


@pytest.mark.parametrize("name", ["max_blocks", "max_bytes"])
@pytest.mark.parametrize(("value", "shown"), NO_COUNTS)
def test_what_is_no_count_is_rejected_with_what_is_one(name, value, shown):
    with pytest.raises(ConfigError) as rejected:
        Bounds(**{name: value})
    expected = f"{name} of an index must be a whole number below 2**63, got {shown}"
    assert str(rejected.value) == expected


@pytest.mark.parametrize("value", [2**63 - 1, np.int64(2**18), np.uint64(2**63 - 1)])
def test_the_most_that_a_table_counts_to_is_fine(value):
    bounds = Bounds(max_blocks=value, max_bytes=value)
    assert (bounds.max_blocks, bounds.max_bytes) == (value, value)


@pytest.mark.parametrize("bounds", [{}, {"max_blocks": 1}, {"max_bytes": 2**18}])
def test_the_least_is_enough_and_none_is_no_bound(bounds):
    assert Bounds(**bounds) == Bounds(**{"max_blocks": None, "max_bytes": None, **bounds})
