import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import holders
from kvplug.kernels._jit import b1, i8, kernel, u4, u8, void, writes

ARRAYS = writes(u8), writes(u8), writes(u4), writes(i8)


@kernel(b1(writes(u8), writes(i8), i8, i8))
def has_room(meta, header, holder, num_runs):
    return holders.has_room(meta, header, holder, num_runs)


@kernel(i8(*ARRAYS, i8, i8))
def toggled(bits, meta, intern, header, set_id, holder):
    return holders.toggled(bits, meta, intern, header, set_id, holder)


@kernel(void(writes(u8), i8))
def retain(meta, set_id):
    holders.retain(meta, set_id)


@kernel(void(*ARRAYS, i8))
def release(bits, meta, intern, header, set_id):
    holders.release(bits, meta, intern, header, set_id)


NUM_RUNS, NUM_HOLDERS, NUM_SETS, WORDS = 12, 130, 64, 3
steps = st.lists(
    st.tuples(
        st.integers(0, 5) | st.sampled_from([63, 64, 127, 128, NUM_HOLDERS - 1]),
        st.lists(st.integers(0, NUM_RUNS - 1), max_size=8),
    ),
    max_size=25,
)


class Sets:
    """The arrays of the kernel, as index/holder_sets.py keeps them, and the set of each run."""

    def __init__(self):
        self.of_run = [0] * NUM_RUNS
        self.bits = np.zeros(NUM_SETS * WORDS, dtype=np.uint64)
        self.meta = np.zeros(NUM_SETS * 2, dtype=np.uint64)
        self.meta[3::2] = np.arange(2, NUM_SETS + 1)
        self.intern = np.zeros(37, dtype=np.uint32)
        self.header = np.array([WORDS, 1, 0], dtype=np.int64)

    def members(self, set_id):
        words = self.bits[set_id * WORDS : (set_id + 1) * WORDS]
        return {h for h in range(NUM_HOLDERS) if int(words[h // 64]) >> (h % 64) & 1}

    def toggle(self, run, holder):
        arrays = self.bits, self.meta, self.intern, self.header
        assert has_room(self.meta, self.header, holder, 1)
        new = int(toggled(*arrays, self.of_run[run], holder))
        retain(self.meta, new)
        release(*arrays, self.of_run[run])
        self.of_run[run] = new


def toggle_all(sets, reference, operations):
    with np.errstate(over="ignore"):
        for holder, changed in operations:
            for run in changed:
                sets.toggle(run, holder)
                reference[run] = reference[run] ^ {holder}


@given(steps)
def test_interned_sets_are_sets(operations):
    sets, reference = Sets(), [frozenset() for _ in range(NUM_RUNS)]
    for operation in operations:
        toggle_all(sets, reference, [operation])
        assert [sets.members(s) for s in sets.of_run] == reference
        # Equal sets have equal numbers: what makes matching a comparison of two integers.
        assert len(set(sets.of_run)) == len(set(reference))
        assert sets.header[holders.NUM_LIVE] == len(set(reference) - {frozenset()})
        assert np.count_nonzero(sets.intern) == sets.header[holders.NUM_LIVE]
        for set_id in set(sets.of_run) - {0}:
            assert sets.meta[2 * set_id + 1] == sets.of_run.count(set_id)


@given(steps)
def test_sets_are_found_again_after_reinterning(operations):
    sets, reference = Sets(), [frozenset() for _ in range(NUM_RUNS)]
    toggle_all(sets, reference, operations)
    sets.intern = np.zeros(80, dtype=np.uint32)
    holders.reintern(WORDS, NUM_SETS, sets.meta, sets.intern)
    live_before = sets.header[holders.NUM_LIVE]
    toggle_all(sets, reference, [(7, range(NUM_RUNS)), (7, range(NUM_RUNS))])
    assert [sets.members(s) for s in sets.of_run] == reference
    assert sets.header[holders.NUM_LIVE] == live_before
