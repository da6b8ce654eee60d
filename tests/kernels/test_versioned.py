"""Versions, names and rings against the plain steps; a shared index against the same one unshared,
and against words that make no sense.
"""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.index.block_store import BlockSpan, BlockStore
from kvplug.index.prefix_query import OWN, PrefixQuery, SharedReads, credits_of
from kvplug.kernels import cache_groups, matching, versioned
from kvplug.kernels.prefix_lengths import NUM_CLASSES
from kvplug.kernels.versioned import GENERATION, RING_HEADER, VERSION

NUM_RANKS, DEPTH = 5, 24
words = st.integers(0, 2**64 - 1)


def control_words(version=0, generation=0):
    control = np.zeros(versioned.CONTROL_WIDTH, dtype=np.uint64)
    control[VERSION], control[GENERATION] = version, generation
    return control


@given(st.integers(0, 2**40), st.lists(st.sampled_from(["event", "death"]), max_size=9))
def test_the_version_is_odd_within_an_event_and_another_one_after_it(version, steps):
    control, seen = control_words(version), {version}
    for generation, step in enumerate(steps, 1):
        versioned.begin_write(control)
        assert control[VERSION] % 2
        assert int(control[VERSION]) not in seen
        seen.add(int(control[VERSION]))
        if step == "event":
            versioned.end_write(control, generation)
            assert control[VERSION] % 2 == 0
            assert control[GENERATION] == generation
            assert int(control[VERSION]) not in seen
            seen.add(int(control[VERSION]))


@given(st.lists(st.integers(1, 2**64 - 1), max_size=30), st.integers(1, 12))
def test_each_name_keeps_a_slot_of_its_own(names, num_slots):
    slots, reference = np.zeros(num_slots, dtype=np.uint64), {}
    for name in names:
        slot = versioned.claim(slots, name)
        if name not in reference and len(reference) < num_slots:
            assert slot not in reference.values()
            reference[name] = slot
        assert slot == reference.get(name, versioned.NO_SLOT)


@given(st.lists(st.one_of(st.lists(words, max_size=15), st.integers(0, 20)), max_size=40))
def test_a_ring_gives_its_words_in_order_or_says_that_they_are_gone(steps):
    ring, written, place = np.zeros(RING_HEADER + 16, dtype=np.uint64), deque(maxlen=16), 0
    num_written = 0
    for step in steps:
        if isinstance(step, list):
            each = np.array(step, dtype=np.uint64)
            versioned.push(ring, each[: len(step) // 2], each[len(step) // 2 :])
            written.extend(step)
            num_written += len(step)
            continue
        out = np.zeros(step, dtype=np.uint64)
        num_words = versioned.pull(ring, place, out)
        if num_written - place > 16:
            assert num_words == versioned.WRITTEN_OVER
            place = num_written
            continue
        expected = list(written)[len(written) - (num_written - place) :][:step]
        assert out[:num_words].tolist() == expected
        place += len(expected)


def filled_store(spans):
    """Holders 0 to 9: rank h // 2, on the device or in host memory, along one path."""
    block_store, hashes = BlockStore(), np.arange(1, DEPTH + 1, dtype=np.uint64)
    for holder, (first, end) in enumerate(spans):
        if first < end:
            parent = int(hashes[first - 1]) if first else 0
            block_store.store(holder, BlockSpan(hashes[first:end], parent))
    return block_store, hashes


def query_of(block_store, shared, groups=()):
    owner = np.full(64, -1, dtype=np.int64)
    owner[: 2 * NUM_RANKS] = [NUM_CLASSES * (h // 2) + h % 2 for h in range(2 * NUM_RANKS)]
    return PrefixQuery(
        block_store,
        owner,
        np.zeros(0, dtype=np.int64),
        credits_of([1.0, 0.75, 0.25, 0.9], np.ones(NUM_RANKS)),
        groups=np.array(groups, dtype=np.int64),
        shared=shared,
    )


def reads_of(generation=0):
    reads = np.zeros(matching.READS_WIDTH, dtype=np.uint64)
    reads[matching.SEEN] = generation
    return reads


# The second group of rank 0 is behind holder 9, and needs 3 blocks.
GROUPS = cache_groups.row(0, num_rows=1, has_main=True, holder=9, num_needed=3)
ends = st.integers(0, DEPTH)
spans = st.lists(st.tuples(ends, ends), min_size=2 * NUM_RANKS, max_size=2 * NUM_RANKS)


@given(spans, st.sampled_from([(), GROUPS]))
def test_a_shared_index_answers_as_one_of_our_own(spans, groups):
    block_store, hashes = filled_store([(0, DEPTH), *spans[1:]])
    reads = reads_of()
    shared = query_of(block_store, SharedReads(control_words(), reads), groups)
    before = [array.copy() for array in block_store.arrays]
    answer = shared.overlap(hashes, 0.0)
    for array, was in zip(block_store.arrays, before, strict=True):
        assert np.array_equal(array, was)  # readers write nothing
    own = query_of(block_store, OWN, groups).overlap(hashes, 0.0)
    assert answer.prefix_lengths.tolist() == own.prefix_lengths.tolist()
    np.testing.assert_allclose(answer.credit, own.credit)
    assert reads.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(("version", "generation"), [(1, 0), (0, 1)])
def test_a_writer_that_died_in_an_event_or_moved_on_leaves_nothing_and_is_counted(
    version, generation
):
    block_store, hashes = filled_store([(0, DEPTH)])
    reads = reads_of()
    shared = query_of(block_store, SharedReads(control_words(version, generation), reads))
    assert not shared.overlap(hashes, 0.0).depth.any()
    assert reads[matching.NUM_GIVEN_UP] == 1


@given(
    spans,
    st.lists(st.tuples(st.sampled_from(["table", "runs", "bits"]), words, words), max_size=40),
    st.sampled_from([(), GROUPS]),
)
def test_words_that_make_no_sense_lead_nowhere_else(spans, changes, groups):
    """What a reader may see in the middle of an event, and more. With bounds checks and without
    JIT, a position outside an array raises.
    """
    block_store, hashes = filled_store([(0, DEPTH), *spans[1:]])
    arrays = {"table": block_store.table.slots[:-2], "runs": block_store.runs.words[8:]}
    arrays["bits"] = block_store.sets.bits
    for name, place, value in changes:
        array, at = arrays[name], place % len(arrays[name])
        # Only filled slots of the table: a writer always leaves some empty.
        if name != "table" or (at % 2 and array[at]):
            array[at] = value or 1
    shared = query_of(block_store, SharedReads(control_words(), reads_of()), groups)
    lengths = shared.overlap(hashes, 0.0).prefix_lengths
    assert ((lengths >= 0) & (lengths <= DEPTH)).all()
