import pytest

from kvplug.errors import ConfigError
from kvplug.index.bounds import Bounds


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("max_blocks", 0, 1),
        ("max_blocks", -1, 1),
        ("max_blocks", -(2**70), 1),
        ("max_bytes", 2**16 - 1, 2**16),
        ("max_bytes", 0, 2**16),
        ("max_bytes", -1, 2**16),
    ],
)
def test_too_little_is_refused_with_what_is_enough(name, value, least):
    with pytest.raises(ConfigError) as refused:
        Bounds(**{name: value})
    assert str(refused.value) == f"{name} of an index must be at least {least}, got {value}"


@pytest.mark.parametrize("bounds", [{}, {"max_blocks": 1}, {"max_bytes": 2**16}])
def test_the_least_is_enough_and_none_is_no_bound(bounds):
    assert Bounds(**bounds) == Bounds(**{"max_blocks": None, "max_bytes": None, **bounds})
