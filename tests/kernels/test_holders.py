import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import holders

NUM_ROWS, NUM_HOLDERS, NUM_SETS, WORDS = 12, 130, 64, 3
steps = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 5) | st.sampled_from([63, 64, 127, 128, NUM_HOLDERS - 1]),
        st.lists(st.integers(0, NUM_ROWS - 1), max_size=8),
    ),
    max_size=25,
)


class Sets:
    """The arrays of the kernel, as index/holdings.py keeps them."""

    def __init__(self):
        self.of_row = np.zeros(NUM_ROWS, dtype=np.uint32)
        self.bits = np.zeros(NUM_SETS * WORDS, dtype=np.uint64)
        self.meta = np.zeros(NUM_SETS * 2, dtype=np.uint64)
        self.meta[3::2] = np.arange(2, NUM_SETS + 1)
        self.intern = np.zeros(37, dtype=np.uint32)
        self.header = np.array([WORDS, 1, 0], dtype=np.int64)

    def arrays(self):
        return self.of_row, self.bits, self.meta, self.intern, self.header

    def members(self, set_id):
        words = self.bits[set_id * WORDS : (set_id + 1) * WORDS]
        return {h for h in range(NUM_HOLDERS) if int(words[h // 64]) >> (h % 64) & 1}


def change(sets, adds, holder, rows):
    kernel = holders.add_holder if adds else holders.drop_holder
    changed = np.empty(len(rows), dtype=np.uint8)
    num_changed = kernel(holder, np.array(rows, dtype=np.uint64), *sets.arrays(), changed)
    assert num_changed == changed.sum()
    return changed.astype(bool).tolist()


def change_twin(twin, adds, holder, rows):
    changed = []
    for row in rows:
        changed.append((holder in twin[row]) != adds)
        twin[row] = twin[row] | {holder} if adds else twin[row] - {holder}
    return changed


@given(steps)
def test_interned_sets_are_sets(operations):
    sets, twin = Sets(), [frozenset() for _ in range(NUM_ROWS)]
    for adds, holder, rows in operations:
        assert change(sets, adds, holder, rows) == change_twin(twin, adds, holder, rows)
        assert [sets.members(s) for s in sets.of_row] == twin
        # Equal sets have equal numbers: what makes matching a comparison of two integers.
        assert len(set(sets.of_row.tolist())) == len(set(twin))
        assert sets.header[holders.NUM_LIVE] == len(set(twin) - {frozenset()})
        assert np.count_nonzero(sets.intern) == sets.header[holders.NUM_LIVE]
        for set_id in set(sets.of_row.tolist()) - {0}:
            assert sets.meta[2 * set_id + 1] == (sets.of_row == set_id).sum()


@given(steps)
def test_rows_of_a_holder(operations):
    sets, twin = Sets(), [frozenset() for _ in range(NUM_ROWS)]
    for adds, holder, rows in operations:
        change(sets, adds, holder, rows)
        change_twin(twin, adds, holder, rows)
    for holder in (0, 3, 64, 129):
        out = np.empty(NUM_ROWS, dtype=np.uint64)
        num_rows = holders.rows_of_holder(holder, sets.of_row, sets.bits, WORDS, out)
        assert out[:num_rows].tolist() == [r for r in range(NUM_ROWS) if holder in twin[r]]


@given(steps)
def test_sets_are_found_again_after_reinterning(operations):
    sets, twin = Sets(), [frozenset() for _ in range(NUM_ROWS)]
    for adds, holder, rows in operations:
        change(sets, adds, holder, rows)
        change_twin(twin, adds, holder, rows)
    sets.intern = np.zeros(80, dtype=np.uint32)
    holders.reintern(WORDS, NUM_SETS, sets.meta, sets.intern)
    live_before = sets.header[holders.NUM_LIVE]
    change(sets, True, 7, list(range(NUM_ROWS)))
    change(sets, False, 7, [r for r in range(NUM_ROWS) if 7 not in twin[r]])
    assert [sets.members(s) for s in sets.of_row] == twin
    assert sets.header[holders.NUM_LIVE] == live_before
