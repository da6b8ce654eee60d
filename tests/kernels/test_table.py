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
        st.tuples(st.just("find_or_put"), st.lists(keys, max_size=12)),
        st.tuples(st.just("rehash"), st.integers(45, 64)),
    ),
    max_size=20,
)


def u64(numbers):
    return np.array(list(numbers), dtype=np.uint64)


def new_slots(capacity):
    return np.zeros(2 * capacity, dtype=np.uint64)


def contents(slots):
    pairs = slots.reshape(-1, 2)
    return {int(k): int(v) for k, v in pairs if v}


def find_all(slots, asked):
    out = np.empty(len(asked), dtype=np.uint64)
    table.find_many(slots, u64(asked), out)
    return out.tolist()


def apply(slots, twin, name, argument):
    if name == "put":
        num_new = table.put_many(slots, u64(k for k, _ in argument), u64(v for _, v in argument))
        assert num_new == len({k for k, _ in argument} - twin.keys())
        twin.update(argument)
    elif name == "erase":
        assert table.erase_many(slots, u64(argument)) == len(set(argument) & twin.keys())
        for key in argument:
            twin.pop(key, None)
    elif name == "find_or_put":
        fresh, out = list(range(1, len(argument) + 1)), np.empty(len(argument), dtype=np.uint64)
        num_taken = table.find_or_put_many(slots, u64(argument), u64(fresh), out)
        supply = iter(fresh)
        for key in argument:
            if key not in twin:
                twin[key] = next(supply)
        assert num_taken == len(fresh) - len(list(supply))
        assert out.tolist() == [twin[key] for key in argument]
    else:
        bigger = new_slots(argument)
        table.rehash(slots, bigger)
        slots = bigger
    return slots


@given(operations, st.lists(keys, max_size=10))
def test_a_table_is_a_dict(steps, asked):
    slots, twin = new_slots(44), {}
    for name, argument in steps:
        slots = apply(slots, twin, name, argument)
        assert contents(slots) == twin
        assert find_all(slots, list(twin)) == list(twin.values())
    assert find_all(slots, asked) == [twin.get(key, 0) for key in asked]


@given(st.lists(keys, max_size=30), st.lists(keys, max_size=30))
def test_find_prefix_stops_at_the_first_absent_key(stored, asked):
    slots = new_slots(44)
    table.put_many(slots, u64(stored), u64(k + 1 if k < 2**64 - 1 else 7 for k in stored))
    out = np.zeros(len(asked), dtype=np.uint64)
    num_found = table.find_prefix(slots, u64(asked), out)
    present = [key in set(stored) for key in [*asked, None]]
    assert num_found == present.index(False)
    assert out[:num_found].tolist() == find_all(slots, asked[:num_found])


@given(st.lists(st.tuples(st.booleans(), st.lists(keys, max_size=10)), max_size=15))
def test_counting_is_a_counter(steps):
    slots, twin = new_slots(44), {}
    for up, batch in steps:
        if up:
            table.count_up_many(slots, u64(batch))
            for key in batch:
                twin[key] = twin.get(key, 0) + 1
            continue
        counted = np.empty(len(batch), dtype=np.uint8)
        table.count_down_many(slots, u64(batch), counted)
        for key, was_there in zip(batch, counted, strict=True):
            assert bool(was_there) == (key in twin)
            if key in twin:
                twin[key] -= 1
                if not twin[key]:
                    del twin[key]
        assert contents(slots) == twin
    assert contents(slots) == twin


@given(
    st.lists(keys, unique=True, max_size=12),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4, unique=True),
    st.data(),
)
def test_runs_extend_while_the_salted_key_is_there(asked, salts, data):
    slots, held = new_slots(64), {}
    for salt in salts:
        held[salt] = data.draw(st.sets(st.sampled_from(asked), max_size=8)) if asked else set()
        salted = u64(key ^ salt for key in held[salt])
        table.put_many(slots, salted, np.ones(len(salted), dtype=np.uint64))
    starts = [data.draw(st.integers(0, len(asked))) for _ in salts]
    ends = np.array(starts, dtype=np.int64)
    table.extend_runs(slots, u64(asked), u64(salts), ends)
    everything = {key ^ salt for salt, members in held.items() for key in members}
    for salt, start, end in zip(salts, starts, ends, strict=True):
        run = [key ^ salt in everything for key in [*asked[start:]]] + [False]
        assert end == start + run.index(False)
