import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.speculative import SpeculativeBlocks

TTL_S, CAPACITY, NUM_RANKS = 2.0, 16, 3
hashes = st.integers(1, 12)
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "confirm", "forget", "wait"]),
        st.integers(0, NUM_RANKS - 1),
        st.lists(hashes, max_size=5, unique=True),
    ),
    max_size=25,
)


def u64(numbers):
    return np.array(numbers, dtype=np.uint64)


def depths(speculative, asked, now_s):
    return speculative.extend(u64(asked), np.zeros(NUM_RANKS, dtype=np.int64), now_s).tolist()


class Twin:
    """deadline by (rank, hash), oldest first; never more than CAPACITY insertions are kept."""

    def __init__(self):
        self.log, self.live = [], {}

    def insert(self, rank, members, now_s):
        for member in members:
            self.log.append((rank, member))
            self.live[rank, member] = (now_s + TTL_S, len(self.log))
        for number, key in enumerate(self.log[: max(0, len(self.log) - CAPACITY)], start=1):
            if self.live.get(key, (0, 0))[1] == number:
                del self.live[key]

    def depth(self, rank, asked, now_s):
        alive = [self.live.get((rank, h), (0, 0))[0] > now_s for h in asked] + [False]
        return alive.index(False)


@given(steps, st.lists(hashes, max_size=6, unique=True))
def test_entries_live_as_long_as_in_the_twin(operations, asked):
    speculative, twin, now_s = SpeculativeBlocks(TTL_S, CAPACITY), Twin(), 100.0
    for name, rank, members in operations:
        if name == "insert":
            speculative.insert(rank, u64(members), now_s)
            twin.insert(rank, members, now_s)
        elif name == "confirm":
            speculative.confirm(rank, u64(members))
            for member in members:
                twin.live.pop((rank, member), None)
        elif name == "forget":
            speculative.forget(rank)
            twin.live = {k: v for k, v in twin.live.items() if k[0] != rank}
        else:
            now_s += 0.75
        expected = [twin.depth(r, asked, now_s) for r in range(NUM_RANKS)]
        assert depths(speculative, asked, now_s) == expected


def test_a_time_to_live_of_0_turns_it_off():
    speculative = SpeculativeBlocks(0.0)
    speculative.insert(0, u64([1, 2]), 0.0)
    assert depths(speculative, [1, 2], 0.0) == [0, 0, 0]


def test_what_does_not_fit_is_counted():
    speculative = SpeculativeBlocks(TTL_S, CAPACITY)
    speculative.insert(0, u64(range(1, CAPACITY + 5)), 0.0)
    speculative.insert(0, u64([100]), 0.0)
    assert (len(speculative), speculative.num_lost) == (CAPACITY, 5)
