"""LoRA adapters that are loaded again with other weights: what they computed before never counts.

vLLM (0.32) gives equal blocks other engine hashes then, and says nothing else.
"""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.events import BlockRemoved, BlockStored, EventBatch, Namespace, Rank, Tier
from kvplug.hashing import as_tokens, seed_of
from kvplug.index.adapters import AdapterSeeds
from kvplug.index.block_index import BlockIndex
from kvplug.index.block_store import BlockStore
from tests.index.four_blocks import TOKENS, A, B, apply, index_of, stored

BASE, X, Y = Namespace(), Namespace("x"), Namespace("y")
SALTED = Namespace("x", "salt")


def held(index, namespace, rank=A):
    hashes = index.hasher.sequence_hashes(as_tokens(TOKENS), seed_of(namespace))
    return int(index.overlap(hashes).depth[index.numbers.number_of(rank)])


def test_a_block_under_another_engine_hash_shows_that_the_adapter_is_another():
    with index_of(A, B) as index:
        for rank in (A, B):
            apply(index, rank, stored(1, 2, namespace=X), stored(3, 4, 5, namespace=SALTED))
            apply(index, rank, stored(6, namespace=Y), stored(7, 8, namespace=BASE))
        applied = apply(index, A, stored(11, namespace=X))
        assert applied.rejected == {"adapter_reloaded": 5}
        assert [held(index, each) for each in (X, SALTED, Y, BASE)] == [1, 0, 1, 2]
        assert [held(index, each, B) for each in (X, SALTED, Y, BASE)] == [2, 3, 1, 2]
        assert sorted(index.engine_hashes_of(A).tolist()) == [6, 7, 8, 11]


def test_all_copies_in_all_tiers_are_forgotten():
    with index_of(A) as index:
        apply(index, A, stored(1, namespace=X), stored(1, namespace=X))
        apply(index, A, stored(1, 2, namespace=X, tier=Tier.HOST))
        assert index.forget_adapter(A, "x") == 4
        assert len(index) == 0


def test_what_an_engine_still_says_of_forgotten_blocks_is_no_lost_event():
    with index_of(A) as index:
        apply(index, A, stored(1, 2, namespace=X))
        assert index.forget_adapter(A, "x") == 2
        behind = stored(3, start=2, parent=2)
        assert apply(index, A, behind).rejected == {"parent_evicted": 1}
        gone = BlockRemoved(block_hashes=(1, 2))
        assert apply(index, A, gone).rejected == {"unknown_block": 2}


@pytest.mark.parametrize("namespace", [X, BASE])
def test_one_engine_hash_for_two_contents_forgets_nothing(namespace):
    with index_of(A) as index:
        apply(index, A, stored(1, 2, namespace=namespace))
        again = BlockStored(
            block_hashes=(1,), token_ids=(9, 9, 9, 9), block_size=4, namespace=namespace
        )
        assert apply(index, A, again).rejected == {"conflicting_hash": 1}
        assert held(index, namespace) == 2


def test_the_base_model_is_not_reloaded():
    with index_of(A) as index:
        apply(index, A, stored(1, 2))
        assert apply(index, A, stored(11)).rejected == {"conflicting_hash": 1}
        assert held(index, BASE) == 2


def test_seeds_of_which_no_block_is_left_are_forgotten():
    index = BlockIndex(4)
    index.add_rank(A)
    for number in range(5000):
        apply_to(index, A, stored(number + 1, namespace=Namespace("x", f"salt {number}")))
        if number >= 10:
            apply_to(index, A, BlockRemoved(block_hashes=(number - 9,)))
    assert index.adapters.nbytes < 160 * 1100
    assert index.forget_adapter(A, "x") == 10
    assert len(index) == 0


def test_seeds_are_known_by_adapter():
    seeds = AdapterSeeds(BlockStore())
    for namespace in (X, SALTED, Y, BASE, Namespace("", "salt")):
        seeds.note(namespace, seed_of(namespace))
    assert set(seeds.of("x").tolist()) == {seed_of(X), seed_of(SALTED)}
    assert seeds.of("new").tolist() == [seed_of(Namespace("new"))]
    assert [seeds.adapter_of(seed_of(each)) for each in (SALTED, Y, BASE)] == ["x", "y", ""]
    again = AdapterSeeds(BlockStore())
    again.load(seeds.items())
    assert again.items() == seeds.items()


RANKS = [Rank("a"), Rank("b", 1)]
NAMESPACES = [BASE, X, SALTED, Y, Namespace("y", "salt")]
namespaces = st.sampled_from(NAMESPACES)
steps = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 1), namespaces, st.integers(1, 4)),
    st.tuples(st.just("reload"), st.integers(0, 1), st.sampled_from("xy"), st.none()),
    st.tuples(st.just("remove"), st.integers(0, 1), namespaces, st.integers(1, 4)),
)


class Engines:
    """What two engines hold, as vLLM would say it: versions of adapters, blocks by version."""

    def __init__(self):
        self.version = defaultdict(int)
        self.cached = {rank: set() for rank in RANKS}

    def name(self, rank, namespace, depth):
        version = self.version[rank, namespace.lora_name]
        return hash(("engine", namespace, version, depth)) % 2**64


class Known:
    """What an index must know: blocks by rank, those of an adapter until it shows another hash."""

    def __init__(self):
        self.names = {rank: {} for rank in RANKS}

    def store(self, rank, namespace, names):
        mine = self.names[rank]
        if any(mine.get((namespace, depth), name) != name for depth, name in names):
            for key in [key for key in mine if key[0].lora_name == namespace.lora_name]:
                del mine[key]
        mine.update({(namespace, depth): name for depth, name in names})

    def remove(self, rank, namespace, depth, name):
        if self.names[rank].get((namespace, depth)) == name:
            del self.names[rank][namespace, depth]

    def held(self, rank, namespace):
        depths = iter(range(1, 5))
        return next((d - 1 for d in depths if (namespace, d) not in self.names[rank]), 4)


@given(steps=st.lists(steps, max_size=25))
def test_credits_are_those_of_the_last_weights_that_an_event_has_shown(steps):
    engines, known, index = Engines(), Known(), BlockIndex(4)
    for rank in RANKS:
        index.add_rank(rank)
    for what, number, of, depth in steps:
        rank = RANKS[number]
        if what == "reload":
            engines.version[rank, of] += 1
            continue
        names = [(d, engines.name(rank, of, d)) for d in range(1, depth + 1)]
        if what == "store":
            known.store(rank, of, names)
            apply_to(index, rank, stored(*(name for _, name in names), namespace=of))
        else:
            known.remove(rank, of, *names[-1])
            remove_all_copies(index, rank, names[-1][1])
        index.check()
    credits = {(rank, of): held(index, of, rank) for rank in RANKS for of in NAMESPACES}
    assert credits == {(rank, of): known.held(rank, of) for rank in RANKS for of in NAMESPACES}


def remove_all_copies(index, rank, name):
    removed = BlockRemoved(block_hashes=(name,))
    while apply_to(index, rank, removed).num_removed:
        pass


def apply_to(index, rank, event):
    return index.apply(rank, EventBatch(events=(event,)))
