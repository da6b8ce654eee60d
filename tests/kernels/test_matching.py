import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import matching
from tests.kernels import twins


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.data())
def test_segments_are_runs_of_equal_sets(set_of_row, data):
    rows = data.draw(st.lists(st.integers(0, len(set_of_row) - 1), max_size=20))
    ends, sets = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    n = matching.segments(
        np.array(rows, dtype=np.uint64), np.array(set_of_row, dtype=np.uint32), ends, sets
    )
    expected = twins.segments([set_of_row[row] for row in rows])
    assert list(zip(ends[:n].tolist(), sets[:n].tolist(), strict=True)) == expected
