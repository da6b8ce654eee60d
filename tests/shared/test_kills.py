"""Writer and readers killed at random points; `make bench-shared` does it a thousand times."""

import os

import pytest

from kvplug.kernels._jit import COMPILED
from tests.shared import kills


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="a second in compiled code is minutes in plain Python")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forks")
def test_no_answer_is_wrong_and_nobody_is_stuck_whoever_is_killed():
    result = kills.run(20)
    assert result.num_wrong == 0, result
    assert result.num_stuck == 0, result
    assert result.num_exact > 100, result
    assert result.num_files <= 10, result
    assert result.left_load == 0.0, result
