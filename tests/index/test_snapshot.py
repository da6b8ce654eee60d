"""A snapshot is the index again, or it is refused and nothing has changed."""

import inspect

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug.errors import SnapshotError
from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    EventBatch,
    MoeLabel,
    Rank,
    Tier,
)
from kvplug.hashing import as_tokens
from kvplug.index import snapshot, snapshot_file
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds
from kvplug.index.cxl import CxlBlocks
from kvplug.index.hash_table import HashTable
from kvplug.index.moe_labels import MoeLabels
from kvplug.kernels import runs
from tests.index.test_evicting import name_of, stored

RANKS = [Rank("a"), Rank("a", 1), Rank("b"), Rank("c")]
contents = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple)
tiers = st.sampled_from([Tier.DEVICE, Tier.HOST])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 3), tiers, contents),
        st.tuples(st.just("remove"), st.integers(0, 3), tiers, contents),
        st.tuples(st.just("clear"), st.integers(0, 3), tiers, st.none()),
        st.tuples(st.just("leave"), st.integers(0, 3), st.none(), st.none()),
    ),
    max_size=20,
)


def seeded(number, name):
    """The last rank's engine has another hash seed, and so a hash space of its own."""
    return name ^ 1 if number == 3 and name is not None else name


def apply(index, step):
    what, number, tier, content = step
    rank = RANKS[number]
    index.add_rank(rank)
    if what == "leave":
        index.remove_worker(rank.worker)
        return
    event = AllBlocksCleared(tier=tier)
    if what == "store":
        whole = stored(content, len(content))
        names = tuple(seeded(number, name) for name in whole.block_hashes)
        event = BlockStored(block_hashes=names, token_ids=whole.token_ids, block_size=1, tier=tier)
    elif what == "remove":
        names = (seeded(number, name_of(content)),)
        event = BlockRemoved(block_hashes=names, tier=tier)
    index.apply(rank, EventBatch(events=(event,)))


def everything(index):
    held = {
        (rank, tier): sorted(index.engine_hashes_of(rank, tier).tolist())
        for rank in index.numbers.ranks
        if rank is not None
        for tier in (Tier.DEVICE, Tier.HOST)
    }
    return held, index.numbers.ranks, index.confidence.tolist(), len(index.hash_spaces), len(index)


@settings(max_examples=30)
@given(steps, steps)
def test_a_restored_index_is_the_same_and_goes_on_alike(tmp_path_factory, before, after):
    path = tmp_path_factory.mktemp("snapshot") / "index"
    index = BlockIndex(1)
    for step in before:
        apply(index, step)
    for rank in [rank for rank in index.numbers.ranks if rank][:1]:
        index.set_confidence(rank, 0.25)
    snapshot.save(index, path)
    restored = snapshot.restore(path)
    assert everything(restored) == everything(index)
    for step in after:
        apply(index, step)
        apply(restored, step)
        restored.check()
    assert everything(restored) == everything(index)
    hashes = index.hasher.sequence_hashes(as_tokens((1, 2, 3, 1)))
    assert (
        restored.overlap(hashes).prefix_lengths.tolist()
        == index.overlap(hashes).prefix_lengths.tolist()
    )


def test_pools_and_labels_are_in_a_snapshot(tmp_path):
    index = BlockIndex(1)
    for rank in RANKS:
        index.add_rank(rank)
    label = MoeLabel(layer=1, expert=2)
    whole = stored((1, 2, 3), 3)
    event = BlockStored(
        block_hashes=whole.block_hashes, token_ids=whole.token_ids, block_size=1, moe=label,
        cxl=CxlMetadata(CxlState.CXL_POOLED, 7, ("b",)),
    )  # fmt: skip
    gone = CxlStateTransition(block_hashes=event.block_hashes[2:], new_state=CxlState.EVICTED)
    index.apply(RANKS[0], EventBatch(events=(event, gone)))
    snapshot.save(index, tmp_path / "index")
    restored = snapshot.restore(tmp_path / "index")
    hashes = index.hasher.sequence_hashes(as_tokens((1, 2, 3)))
    for each in (index, restored):
        overlap = each.overlap(hashes)
        assert overlap.cxl_accessible.tolist() == [2, 0, 2, 0]
        labels, cxl = each.annotation(MoeLabels), each.annotation(CxlBlocks)
        assert labels.num_aligned(hashes, label, overlap.held).tolist() == [2, 0, 2, 0]
        assert cxl.metadata(RANKS[0], int(hashes[2])).state is CxlState.EVICTED
        assert cxl.metadata(RANKS[0], int(hashes[0])).accessible_workers == ("b",)
    restored.remove_worker("a")
    restored.check()
    assert len(restored) == 0


@pytest.fixture
def saved(tmp_path):
    index = BlockIndex(1)
    for step in [("store", 0, Tier.DEVICE, (1, 2, 3)), ("store", 3, Tier.HOST, (1, 2, 2))]:
        apply(index, step)
    snapshot.save(index, tmp_path / "index")
    return index, tmp_path / "index"


def rewritten(path, change):
    """The file with other contents, in a form that is right."""
    file = snapshot_file.read(path)
    change(file.arrays, file.settings)
    snapshot_file.write(path, file.arrays, file.settings)


def break_the_first_free_run(arrays, _):
    words = arrays["runs"]
    words[int(runs.USED)] |= np.uint64(1 << 32)
    words[int(runs.START)] = 10**11


def remember_a_holder_that_is_none(arrays, _):
    words = arrays["runs"].reshape(-1, runs.WIDTH)
    linked = int(np.flatnonzero(words[:, int(runs.LINKS)] & np.uint64(0xFFFFFFFF))[0])
    words[linked, int(runs.PARENT)] = 10**13


BROKEN = {
    "the first free run": break_the_first_free_run,
    "a remembered holder": remember_a_holder_that_is_none,
    "two free lists": lambda arrays, _: arrays["runs"].__setitem__(8 * 200 + 1, 202),
    "a run that is none": lambda arrays, _: arrays["table"].__setitem__(
        int(np.flatnonzero(arrays["table"][1:-2:2])[0]) * 2 + 1, 2**31
    ),
    "a set that is none": lambda arrays, _: arrays["runs"].__setitem__(8, 10**6),
    "a set in no run": lambda arrays, _: arrays["intern"].__setitem__(slice(None), 10**6),
    "a count": lambda arrays, _: arrays["table"].__setitem__(-2, 1),
    "a full table": lambda arrays, _: arrays["engine_hashes0"].__setitem__(slice(None), 7),
    "a link": lambda arrays, _: arrays["runs"].__setitem__(15, 10**6),
    "an owner": lambda arrays, _: arrays["owner"].__setitem__(0, 10**6),
    "a dtype": lambda arrays, _: arrays.__setitem__("owner", arrays["owner"].astype(np.float64)),
    "an array": lambda arrays, _: arrays.pop("meta"),
    "another array": lambda arrays, _: arrays.__setitem__("more", np.zeros(1)),
    "a header": lambda arrays, _: arrays.__setitem__("header", arrays["header"][:2].copy()),
    "words": lambda arrays, _: arrays["header"].__setitem__(0, 7),
    "a free set": lambda arrays, _: arrays["header"].__setitem__(1, 10**6),
    "a free run": lambda arrays, _: arrays["runs"].__setitem__(8 * 200 + 1, 10**6),
    "an invariant": lambda arrays, _: arrays["runs"].__setitem__(8 + 2, 1),
    "ranks": lambda _, settings: settings.__setitem__("ranks", settings["ranks"][:1]),
    "hash spaces": lambda _, settings: settings.__setitem__("hash_spaces", [[], []]),
    "a common hash space": lambda _, settings: settings.__setitem__("common", 9),
    "a block size": lambda _, settings: settings.__setitem__("block_size", 0),
    "a layout": lambda _, settings: settings.__setitem__("layout", 6),
    "a pool": lambda _, settings: settings["pools"].append({"holder": 7, "rank": 0, "workers": []}),
    "an annotation": lambda _, settings: settings["annotations"].__setitem__("window", []),
    "an annotation's array": lambda arrays, _: arrays.pop("cxl.ring"),
    "an array of no annotation": lambda arrays, _: arrays.__setitem__("a.b", arrays["moe.table"]),
    "an annotation's table": lambda arrays, _: arrays["cxl.table"].__setitem__(-2, 1),
    "an annotation's dtype": lambda arrays, _: arrays.__setitem__("moe.table", np.zeros(4)),
    "an annotation's settings": lambda _, settings: settings["annotations"].__setitem__("moe", 1),
    "a placement of nobody": lambda _, settings: settings["annotations"].__setitem__(
        "cxl", [[[99, 7, None], None]]
    ),
    "a placement without its pool": lambda _, settings: settings["annotations"].__setitem__(
        "cxl", [[[0, 7, None], 5]]
    ),
    "an entry of no placement": lambda arrays, _: HashTable(slots=arrays["cxl.table"]).put(
        np.array([7], dtype=np.uint64), np.array([1 << 2 | 1], dtype=np.uint64)
    ),
    "a setting": lambda _, settings: settings.__setitem__("more", 1),
    "a type": lambda _, settings: settings.__setitem__("confidence", "much"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_whole_but_not_sound_is_rejected(saved, what):
    _, path = saved
    rewritten(path, BROKEN[what])
    with pytest.raises(SnapshotError, match="cannot restore an index"):
        snapshot.restore(path)


def test_a_file_of_a_former_layout_is_rejected_by_its_number(saved):
    _, path = saved
    rewritten(path, lambda _, settings: settings.pop("layout"))
    with pytest.raises(
        SnapshotError, match="expected an index of layout 5, got layout 1 of kvplug"
    ):
        snapshot.restore(path)


def test_blocks_of_bigrams_come_back_as_such(tmp_path):
    index = BlockIndex(4, bigrams=True)
    index.add_rank(RANKS[0])
    event = BlockStored(block_hashes=(1, 2), token_ids=tuple(range(9)), block_size=4, bigrams=True)
    index.apply(RANKS[0], EventBatch(events=(event,)))
    snapshot.save(index, tmp_path / "index")
    restored = snapshot.restore(tmp_path / "index")
    assert restored.bigrams
    assert not restored.apply(RANKS[0], EventBatch(events=(event,))).rejected
    hashes = index.hasher.sequence_hashes(as_tokens(range(9)))
    assert restored.overlap(hashes).held.tolist() == [2]


def test_every_setting_of_an_index_is_in_the_file_or_asked_for_anew(saved):
    _, path = saved
    settings = set(inspect.signature(BlockIndex).parameters)
    asked = set(snapshot.IndexOptions.__annotations__)
    in_file = set(snapshot_file.read(path).settings)
    assert settings - asked - in_file == set()


def test_annotations_that_a_file_does_not_have_are_empty(saved):
    index, path = saved

    def without_labels(arrays, settings):
        del arrays["moe.table"], settings["annotations"]["moe"]

    rewritten(path, without_labels)
    restored = snapshot.restore(path)
    assert (everything(restored), len(restored.annotation(MoeLabels))) == (everything(index), 0)


def test_a_truncated_file_is_rejected_and_the_index_goes_on(saved):
    index, path = saved
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SnapshotError):
        snapshot.restore(path)
    index.check()
    snapshot.save(index, path)
    assert everything(snapshot.restore(path)) == everything(index)


def test_queries_may_come_while_it_is_written(saved, monkeypatch):
    index, path = saved
    hashes = index.hasher.sequence_hashes(as_tokens((1, 2, 3)))
    taken = snapshot.Snapshot(index)
    for _ in range(100):
        index.overlap(hashes)
    taken.write(path)
    assert everything(snapshot.restore(path)) == everything(index)


def test_bounds_hold_for_a_restored_index(saved):
    _, path = saved
    restored = snapshot.restore(path, bounds=Bounds(max_blocks=6))
    for token in range(10, 30):
        apply(restored, ("store", 0, Tier.DEVICE, (token,) * 3))
    assert len(restored) <= 6
    restored.check()


def test_settings_name_the_ranks(saved):
    _, path = saved
    settings_ = snapshot_file.read(path).settings
    assert msgspec.convert(settings_["ranks"], list[Rank]) == [RANKS[0], RANKS[3]]
