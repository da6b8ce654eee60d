"""Packed events in a Router: of which blocks they are, who reads pools, and queries in between."""

import threading

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import ConfigError, DecodeError, UnknownRankError
from kvplug.events import CxlMetadata, CxlState, MoeLabel
from kvplug.hashing import BlockHasher
from kvplug.index.cxl import CxlBlocks
from kvplug.index.moe_labels import MoeLabels
from kvplug.packed import PackedAdapter, PackedCleared, PackedStored, PackedTransition, encode
from kvplug.router import followed_fleet

A, B, C = Rank("a"), Rank("b"), Rank("c")
TOKENS = list(range(64))


def make_router(*workers, **settings):
    router = Router(RouterConfig(speculative_ttl_s=0.0, **settings))
    for worker in workers or ("a", "b", "c"):
        router.add_worker(worker)
    return router


def stored(block_size=16, **more):
    hashes = BlockHasher(block_size).sequence_hashes(TOKENS)
    return PackedStored(range(1, len(hashes) + 1), hashes, **more)


class TestBlocks:
    def test_they_are_as_the_publisher_says(self):
        router = make_router()
        assert router.set_blocks(A, 8)
        assert router.apply_packed(A, encode([stored(8)])).num_stored == 8
        assert router.route([*TOKENS, 1], workers=["a"]).cached_tokens == 64
        assert router.set_blocks(B, 32)
        assert router.apply_packed(B, encode([stored(32)])).num_stored == 2
        assert router.index_of(A).block_size == 8
        assert router.index_of(B).block_size == 32

    def test_a_size_that_was_configured_stays(self):
        router = make_router(block_size=16)
        assert not router.set_blocks(A, 32)
        assert router.set_blocks(A, 16)
        router.add_worker("d", block_size=32)
        assert router.set_blocks(Rank("d"), 32)
        assert not router.set_blocks(Rank("d"), 16)

    def test_what_a_worker_holds_stays(self):
        router = make_router()
        router.set_blocks(A, 8)
        router.apply_packed(A, encode([stored(8)]))
        assert not router.set_blocks(A, 16)
        router.clear(A)
        assert router.set_blocks(A, 16)
        router.index_of(A).check()

    def test_pairs_of_tokens_are_an_index_of_their_own(self):
        router = make_router()
        assert router.set_blocks(A, 16, bigrams=True)
        assert router.index_of(A).bigrams
        assert router.apply_packed(A, encode([stored()])).num_stored == 4
        other = encode([stored(bigrams=False)])
        assert router.apply_packed(A, other).rejected == {"bigram_tokens": 4}

    def test_blocks_of_another_size_are_refused(self):
        router = make_router()
        router.set_blocks(A, 16)
        odd = encode([stored(block_size=8), stored(block_size=8, attention="mamba", group=1)])
        assert router.apply_packed(A, odd).num_stored == 16
        said = [stored(), PackedStored([9], [9], None, block_size=8)]
        said += [PackedStored([8], [8], None, group=1, attention="mamba", block_size=8)]
        rejected = router.apply_packed(B, encode(said)).rejected
        assert rejected == {"block_size": 1, "group_block_size": 1}

    @pytest.mark.parametrize("size", [0, -1, 2**20, "16", 1.5])
    def test_what_is_no_size_is_named(self, size):
        with pytest.raises(ConfigError, match="block_size must be"):
            make_router().set_blocks(A, size)

    def test_a_stranger_is_named(self):
        with pytest.raises(UnknownRankError):
            make_router().set_blocks(Rank("nobody"), 16)


def pooled(*names, pool_id=7, workers=None):
    return PackedTransition(names, CxlState.CXL_POOLED, pool_id, workers)


def depths(router):
    overlap = router.index.overlap_of_tokens(TOKENS)
    return {rank.worker: overlap.of(rank).held for rank in (A, B, C) if rank in router.ranks}


class TestPools:
    def test_whoever_says_so_reads_them(self):
        router = make_router()
        router.set_cxl_pools("b", [7])
        router.apply_packed(A, encode([stored(), pooled(1, 2, 3)]))
        assert depths(router) == {"a": 4, "b": 3, "c": 0}
        router.set_cxl_pools("c", [7, 8])  # later than the blocks
        assert depths(router) == {"a": 4, "b": 3, "c": 3}
        router.set_cxl_pools("b", [])
        assert depths(router) == {"a": 4, "b": 0, "c": 3}
        router.index.check()

    def test_workers_that_an_event_names_are_the_ones(self):
        router = make_router()
        router.set_cxl_pools("b", [7])
        router.apply_packed(A, encode([stored(), pooled(1, 2, workers=("c",))]))
        assert depths(router) == {"a": 4, "b": 0, "c": 2}
        router.apply_packed(A, encode([pooled(1, pool_id=None)]))  # inherits both
        assert depths(router) == {"a": 4, "b": 0, "c": 2}
        router.index.check()

    def test_a_worker_that_leaves_reads_nothing_when_it_is_back(self):
        router = make_router()
        router.set_cxl_pools("b", [7])
        router.apply_packed(A, encode([stored(), pooled(1)]))
        router.remove_worker("b")
        router.add_worker("b")
        assert depths(router) == {"a": 4, "b": 0, "c": 0}
        router.index.check()

    def test_they_are_read_in_each_index(self):
        router = make_router()
        router.set_cxl_pools("b", [7])
        router.set_blocks(A, 32)
        router.set_blocks(B, 32)
        router.apply_packed(A, encode([stored(32), pooled(1)]))
        index = router.index_of(A)
        assert index.overlap_of_tokens(TOKENS).of(B).held == 1
        index.check()

    def test_they_survive_a_file(self, tmp_path):
        router = make_router()
        router.set_cxl_pools("b", [7])
        router.apply_packed(A, encode([stored(), pooled(1, 2)]))
        router.save_index(tmp_path / "index")
        restored = make_router()
        restored.set_cxl_pools("c", [7])
        restored.load_index(tmp_path / "index")
        assert depths(restored) == {"a": 4, "b": 0, "c": 2}
        restored.set_cxl_pools("b", [7])
        assert depths(restored) == {"a": 4, "b": 2, "c": 2}
        restored.index.check()

    @pytest.mark.parametrize("pools", [7, "7", [1.5], ["7"], None])
    def test_what_are_no_ids_is_named(self, pools):
        with pytest.raises(ConfigError, match="expected ids of CXL pools"):
            make_router().set_cxl_pools("a", pools)

    def test_a_stranger_is_named(self):
        with pytest.raises(UnknownRankError):
            make_router().set_cxl_pools("nobody", [1])


def test_labels_and_states_come_with_packed_events():
    router, label = make_router(), MoeLabel(3, 5)
    said = CxlMetadata(CxlState.IN_TRANSIT, 7, ("b",))
    router.apply_packed(A, encode([stored(moe=label, cxl=said)]))
    first = int(router.index.hasher.sequence_hashes(TOKENS)[0])
    assert router.index.annotation(MoeLabels).label(A, first) == label
    assert router.index.annotation(CxlBlocks).metadata(A, first) == said
    router.apply_packed(A, encode([PackedTransition([1], CxlState.EVICTED)]))
    evicted = router.index.annotation(CxlBlocks).metadata(A, first)
    assert evicted == CxlMetadata(CxlState.EVICTED, 7, ("b",))


def test_an_adapter_is_known_by_its_seed():
    router = make_router()
    router.apply_packed(A, encode([PackedAdapter(99, "lora"), stored(seed=99)]))
    assert router.forget_adapter("a", "lora") == 4
    assert len(router.index) == 0


def test_an_adapter_is_forgotten_in_pools_too():
    router = make_router()
    said = [PackedAdapter(99, "lora"), stored(seed=99, moe=MoeLabel(1, 2)), pooled(1, 2)]
    router.apply_packed(A, encode(said))
    assert router.forget_adapter("a", "lora") == 4
    router.index.check()
    assert depths(router)["a"] == 0


def test_nothing_is_done_of_a_payload_that_is_none():
    router = make_router()
    whole = encode([stored(), pooled(1), PackedAdapter(9, "lora"), PackedCleared()])
    for end in range(len(whole)):
        with pytest.raises(DecodeError):
            router.apply_packed(A, whole[:end])
    assert len(router.index) == 0
    router.index.check()


def test_queries_go_between_the_slices_of_a_payload(monkeypatch):
    monkeypatch.setattr(followed_fleet, "BLOCKS_PER_SLICE", 16)
    router = make_router(block_size=16)
    events = [PackedStored([n], [n]) for n in range(1, 20_000)]
    payload, seen = encode(events), []
    thread = threading.Thread(target=router.apply_packed, args=(A, payload))
    thread.start()
    while thread.is_alive():
        router.route([1] * 32)
        seen.append(len(router.index))
    thread.join()
    assert len(router.index) == len(events)
    assert any(0 < size < len(events) for size in seen)
    router.index.check()
