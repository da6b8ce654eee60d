import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import costing
from tests.kernels import twins

loads = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(0, 50), st.integers(0, 10)),
    max_size=6,
)


@given(st.floats(0, 50), st.integers(0, 50), st.floats(0, 4), loads)
def test_cost_is_the_formula(prompt_blocks, num_full_blocks, weight, ranks):
    credit, prefill, active, active_depth = (
        (list(c) for c in zip(*ranks, strict=True)) if ranks else ([], [], [], [])
    )
    out = np.empty(len(ranks))
    costing.cost(
        prompt_blocks, num_full_blocks, weight, np.array(credit, dtype=float),
        np.array(prefill, dtype=float), np.array(active, dtype=np.int64),
        np.array(active_depth, dtype=np.int64), out,
    )  # fmt: skip
    expected = twins.cost(
        prompt_blocks, num_full_blocks, weight, credit, prefill, active, active_depth
    )
    np.testing.assert_allclose(out, expected)


def test_the_worked_example_of_the_specification():
    # Three workers with 8, 5, 2 blocks to prefill and 10, 5, 9 to decode: the second one wins.
    out = np.empty(3)
    credit = np.array([2.0, 5.0, 8.0])
    zeros = np.zeros(3, dtype=np.int64)
    costing.cost(10.0, 0, 1.0, credit, np.zeros(3), np.array([10, 5, 9]), zeros, out)
    assert out.tolist() == [18.0, 10.0, 11.0]
