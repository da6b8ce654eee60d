import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import table

# Few keys and a small table, so that clusters, wrap-around and shifting back all happen.
keys = st.integers(0, 40) | st.sampled_from([2**64 - 1, 2**63, 0x9E3779B97F4A7C15])
values = st.integers(1, 2**64 - 1)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.tuples(keys, values), max_size=12)),
        st.tuples(st.just("erase"), st.lists(keys, max_size=12)),
        st.tuples(st.just("rehash"), st.sampled_from([48, 52, 64])),
    ),
    max_size=20,
)


def u64(numbers):
    return np.array(list(numbers), dtype=np.uint64)


def new_slots(capacity):
    return np.zeros(2 * capacity + 2, dtype=np.uint64)


def contents(slots):
    pairs = slots[:-2].reshape(-1, 2)
    return {int(k): int(v) for k, v in pairs if v}


def find_all(slots, asked):
    out = np.empty(len(asked), dtype=np.uint64)
    table.find_many(slots, u64(asked), out)
    return out.tolist()


def apply(slots, reference, name, argument):
    if name == "put":
        table.put_many(slots, u64(k for k, _ in argument), u64(v for _, v in argument))
        reference.update(argument)
    elif name == "erase":
        assert table.erase_many(slots, u64(argument)) == len(set(argument) & reference.keys())
        for key in argument:
            reference.pop(key, None)
    else:
        bigger = new_slots(argument)
        table.rehash(slots, bigger)
        slots = bigger
    return slots


@given(operations, st.lists(keys, max_size=10))
def test_a_table_is_a_dict(steps, asked):
    slots, reference = new_slots(44), {}
    for name, argument in steps:
        slots = apply(slots, reference, name, argument)
        assert contents(slots) == reference
        assert find_all(slots, list(reference)) == list(reference.values())
        assert table.count_reachable(slots) == int(slots[-2]) == len(reference)
    assert find_all(slots, asked) == [reference.get(key, 0) for key in asked]


def test_an_entry_that_is_not_found_is_counted():
    slots = new_slots(44)
    table.put_many(slots, u64([1, 2, 3]), u64([1, 1, 1]))
    at = int(np.flatnonzero(slots[:-2:2] == 1)[0])
    slots[2 * at] = 40
    assert table.count_reachable(slots) == -1


@given(
    st.lists(keys, max_size=12),
    st.dictionaries(keys, st.integers(1, 3), max_size=20),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), max_size=4),
    st.data(),
)
def test_values_are_counted_up_to_an_end(asked, held, wanted, data):
    slots = new_slots(64)
    table.put_many(slots, u64(held), u64(held.values()))
    ends = [data.draw(st.integers(0, len(asked))) for _ in wanted]
    counts = np.full(len(wanted), 99, dtype=np.int64)
    salts, values = u64(salt for salt, _ in wanted), u64(value for _, value in wanted)
    table.count_equal(slots, u64(asked), salts, np.array(ends, dtype=np.int64), values, counts)
    assert counts.tolist() == [
        sum(held.get(key ^ salt) == value for key in asked[:end])
        for (salt, value), end in zip(wanted, ends, strict=True)
    ]
