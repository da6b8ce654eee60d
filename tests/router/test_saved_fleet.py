"""A router goes on with all that another one knew: models, block sizes, pools, labels, adapters."""

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug import BlockRemoved, BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, SnapshotError
from kvplug.events import (
    BlockCopied,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    MoeLabel,
    Namespace,
    Tier,
)
from kvplug.index import snapshot_file
from kvplug.index.moe_labels import MoeLabels

TOKENS = tuple(range(64))
NAMES = (11, 12, 13, 14)
WORKERS = {
    "a": ("m", 16, 2),
    "b": ("m", 16, 1),
    "c": ("other", 32, 1),
    "d": ("", None, 1),
    "e": ("m", 16, 1),
}


def stored(names=NAMES, block_size=16, **more):
    """Blocks of TOKENS under NAMES, of other tokens under other names."""
    first = 0 if names[0] in (NAMES[0], 1000 + NAMES[0]) else names[0]
    tokens = tuple(range(first, first + len(names) * block_size))
    return BlockStored(block_hashes=names, token_ids=tokens, block_size=block_size, **more)


def make_router(workers=WORKERS, **config):
    router = Router(RouterConfig(speculative_ttl_s=0.0, **config))
    for name, (model, block_size, dp_size) in workers.items():
        router.add_worker(name, model=model, block_size=block_size, dp_size=dp_size)
    return router


def tell(router, rank, *events):
    return router.apply(rank, EventBatch(events=events))


def a_full_router():
    """With something of everything."""
    router = make_router()
    router.set_cxl_pools("b", [7])
    pooled = CxlMetadata(CxlState.CXL_POOLED, 7, None)
    named = CxlMetadata(CxlState.CXL_POOLED, 8, ("b",))
    label = MoeLabel(layer=1, expert=2)
    tell(router, Rank("a"), stored(moe=label), stored((21, 22), cxl=pooled))
    gone = CxlStateTransition(block_hashes=(14,), new_state=CxlState.EVICTED)
    tell(router, Rank("a"), stored((31,), cxl=named), gone)
    adapter = Namespace(lora_name="sql")
    tell(router, Rank("a", 1), stored((81, 82), namespace=adapter))
    tell(router, Rank("a", 1), stored((91, 92), tier=Tier.HOST))
    windows = {"group": 1, "attention": "sliding_window", "sliding_window": 32}
    tell(router, Rank("b"), stored(), BlockCopied(block_hashes=NAMES[2:], **windows))
    other_hashes = tuple(name + 1000 for name in NAMES)
    tell(router, Rank("e"), stored(other_hashes))  # has a hash space of its own
    tell(router, Rank("c"), stored((11, 12), block_size=32))
    tell(router, Rank("d"), BlockStored(block_hashes=(5,), token_ids=(1, 2, 3, 4, 5),
                                        block_size=4, bigrams=True))  # fmt: skip
    router.set_confidence(Rank("b"), 0.25)
    router.set_recomputed_blocks(Rank("c"), 1)
    return router


def frozen(router):
    return router.freeze_indexes({}, {}).encode()


def contents(data):
    """What is in the bytes, but not when queries used it."""
    file = snapshot_file.decode(data)
    arrays = {name: array.tolist() for name, array in file.arrays.items()}
    parsed = {
        name: msgspec.json.decode(bytes(array))
        for name, array in arrays.items()
        if name == "workers" or name.endswith("-settings")
    }
    return file.settings, arrays | parsed


def restored_from(data, workers=WORKERS, ranks=None, **config):
    router = make_router(workers, **config)
    taken = router.restore_indexes(
        snapshot_file.decode(data), router.ranks if ranks is None else ranks
    )
    for group in router.fleet_index.groups:
        group.index.check()
    return router, taken


def held(router):
    """By rank and tier, the engine's hashes."""
    return {
        (rank, tier): sorted(router.index_of(rank).engine_hashes_of(rank, tier).tolist())
        for rank in router.ranks
        for tier in (None, *Tier)
    }


def test_everything_survives():
    router = a_full_router()
    assert len(router.fleet_index.groups) == 3
    index = router.index_of(Rank("a"))
    assert len(index.hash_spaces) == 2
    assert len(index.numbers.pools) == 2
    assert len(index.annotation(MoeLabels)) == 3
    data = frozen(router)
    restored, taken = restored_from(data)
    assert taken == set(router.ranks)
    assert contents(frozen(restored)) == contents(data)
    assert held(restored) == held(router)
    for rank in router.ranks:
        overlaps = [
            each.peek(TOKENS, workers=[rank.worker], dp_rank=rank.dp_rank).overlap_blocks
            for each in (router, restored)
        ]
        assert overlaps[0] == overlaps[1]
        assert restored.fleet_index.confidence_of(rank) == router.fleet_index.confidence_of(rank)
        assert restored.fleet_index.num_recomputed(rank) == (rank == Rank("c"))


def test_it_goes_on_alike():
    router = a_full_router()
    restored, _ = restored_from(frozen(router))
    more = [
        (Rank("a"), BlockRemoved(block_hashes=(11,))),
        (Rank("a"), CxlStateTransition(block_hashes=(21,), new_state=CxlState.LOCAL_GPU)),
        (Rank("b"), stored((41, 42))),
        (Rank("c"), BlockRemoved(block_hashes=(12,))),
        (Rank("d"), BlockStored(block_hashes=(6,), token_ids=(7, 8, 9, 10, 5), block_size=4,
                                bigrams=True)),
    ]  # fmt: skip
    for rank, event in more:
        for each in (router, restored):
            assert not tell(each, rank, event).rejected
    assert contents(frozen(restored)) == contents(frozen(router))


def test_what_is_frozen_stays_as_it_was():
    router = a_full_router()
    before = contents(frozen(router))
    file = router.freeze_indexes({}, {})
    for rank in router.ranks:
        router.clear(rank)
    assert contents(file.encode()) == before


def test_requests_are_routed_and_events_wait_while_it_freezes(monkeypatch):
    router, steps = a_full_router(), []
    may_end, is_copying = threading.Event(), threading.Event()
    copy = snapshot_file.FileBytes.__init__

    def slow_copy(self, *args):
        is_copying.set()
        assert may_end.wait(30)
        copy(self, *args)
        steps.append("frozen")

    monkeypatch.setattr(snapshot_file.FileBytes, "__init__", slow_copy)
    freezing = threading.Thread(target=frozen, args=(router,))
    freezing.start()
    assert is_copying.wait(30)

    def apply():
        tell(router, Rank("b"), stored((71,)))
        steps.append("applied")

    applying = threading.Thread(target=apply)
    applying.start()
    assert router.route(TOKENS, model="m").overlap_blocks > 0
    may_end.set()
    freezing.join(30)
    applying.join(30)
    assert steps == ["frozen", "applied"]


def test_ranks_that_are_not_asked_for_have_nothing():
    data = frozen(a_full_router())
    restored, taken = restored_from(data, ranks=[Rank("a"), Rank("c"), Rank("gone")])
    assert taken == {Rank("a"), Rank("c")}
    having = {rank for (rank, tier), names in held(restored).items() if names and tier is None}
    assert having == taken
    assert tell(restored, Rank("b"), stored()).num_stored == 4


def test_workers_that_are_not_in_the_fleet_are_left_out():
    data = frozen(a_full_router())
    workers = {"b": WORKERS["b"], "new": ("m", 16, 1)}
    restored, taken = restored_from(data, workers, ranks=[Rank(name) for name in WORKERS])
    assert taken == {Rank("b")}
    assert len(restored.fleet_index.groups) == 1
    assert tell(restored, Rank("new"), stored()).num_stored == 4


@pytest.mark.parametrize("changed", [("another", 16, 2), ("m", 32, 2)])
def test_a_worker_with_another_model_or_block_size_is_left_out(changed):
    data = frozen(a_full_router())
    restored, taken = restored_from(data, WORKERS | {"a": changed})
    assert taken == {Rank("b"), Rank("c"), Rank("d"), Rank("e")}
    names = NAMES[: len(TOKENS) // changed[1]]
    assert tell(restored, Rank("a"), stored(names, changed[1])).num_stored == len(names)


def test_a_rank_more_is_added():
    data = frozen(a_full_router())
    restored, _ = restored_from(data, WORKERS | {"b": ("m", 16, 3)})
    assert tell(restored, Rank("b", 2), stored((61, 62))).num_stored == 2


def test_a_router_that_has_blocks_is_not_overwritten():
    data, router = frozen(a_full_router()), make_router()
    tell(router, Rank("a"), stored())
    before = held(router)
    with pytest.raises(ConfigError, match="expected a router without blocks, this one has 4"):
        router.restore_indexes(snapshot_file.decode(data), router.ranks)
    assert held(router) == before


def rewritten(data, change):
    file = snapshot_file.decode(data)
    change(file.arrays, file.settings)
    return snapshot_file.FileBytes(file.arrays, file.settings).encode()


BROKEN = {
    "no models": lambda _, settings: settings.pop("models"),
    "models of another type": lambda _, settings: settings.__setitem__("models", [1]),
    "a model too many": lambda _, settings: settings["models"].append("more"),
    "no workers": lambda arrays, _: arrays.pop("workers"),
    "workers that are none": lambda arrays, _: arrays.__setitem__(
        "workers", np.frombuffer(b"[1]", np.uint8)
    ),
    "an index without settings": lambda arrays, _: arrays.pop("index1-settings"),
    "an index without an array": lambda arrays, _: arrays.pop("index1-runs"),
    "an index that is not sound": lambda arrays, _: arrays["index0-owner"].__setitem__(0, 10**6),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_whole_but_not_sound_is_refused(what):
    data = rewritten(frozen(a_full_router()), BROKEN[what])
    router = make_router()
    with pytest.raises(SnapshotError):
        router.restore_indexes(snapshot_file.decode(data), router.ranks)
    assert not any(held(router).values())
    assert tell(router, Rank("a"), stored()).num_stored == 4


names = st.integers(0, 5)
kinds = st.tuples(st.sampled_from(["", "m", "n"]), st.sampled_from([None, 16, 32]))
acts = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "clear"]), names, names, st.integers(1, 3)),
    max_size=15,
)


def act(router, what, worker, name, num_blocks):
    """Of a worker of the fleet; each stores blocks of one size."""
    workers = sorted({rank.worker for rank in router.ranks})
    rank = Rank(workers[worker % len(workers)])
    size = 32 if rank.worker in ("d", "e") else 16
    block_names = tuple(100 * name + 1 + i for i in range(num_blocks))
    if what == "store":
        tell(router, rank, stored(block_names, size))
    elif what == "remove":
        tell(router, rank, BlockRemoved(block_hashes=block_names[-1:]))
    else:
        router.clear(rank)


@settings(max_examples=20)
@given(st.lists(kinds, min_size=1, max_size=5), acts, acts)
def test_any_fleet_goes_on_alike(kinds, before, after):
    workers = {name: (*kind, 1) for name, kind in zip("abcde", kinds, strict=False)}
    router = make_router(workers)
    for each in before:
        act(router, *each)
    restored, taken = restored_from(frozen(router), workers)
    assert taken >= {rank for rank in router.ranks if router.index_of(rank).holds_any(rank)}
    assert held(restored) == held(router)
    for each in after:
        act(router, *each)
        act(restored, *each)
    assert held(restored) == held(router)
    for group in restored.fleet_index.groups:
        group.index.check()


DATA = []


@settings(max_examples=30)
@given(st.data())
def test_damaged_bytes_are_refused(data):
    if not DATA:
        DATA.append(bytes(frozen(a_full_router())))
    whole = DATA[0]
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    for each in (damaged, whole[:at], whole + b"x"):
        with pytest.raises(SnapshotError):
            snapshot_file.decode(each)


def test_bytes_and_a_file_are_the_same(tmp_path):
    arrays = {"a": np.arange(5, dtype=np.uint64), "b": np.zeros(0, dtype=np.uint8)}
    snapshot_file.write(tmp_path / "file", arrays, {"x": 1})
    assert snapshot_file.FileBytes(arrays, {"x": 1}).encode() == (tmp_path / "file").read_bytes()
