"""A router's index is written while requests go on and events wait."""

import threading

import pytest

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import ConfigError
from kvplug.index import snapshot

TOKENS = tuple(range(64))


def stored(first_name, block_size=16):
    num_blocks = len(TOKENS) // block_size
    names = tuple(range(first_name, first_name + num_blocks))
    event = BlockStored(block_hashes=names, token_ids=TOKENS, block_size=block_size)
    return EventBatch(events=(event,))


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=16, speculative_ttl_s=0.0))
    for worker in ("a", "b"):
        router.add_worker(worker)
    router.apply(Rank("a"), stored(100))
    return router


def test_what_is_saved_is_restored(router, tmp_path):
    router.save_index(tmp_path / "index")
    index = snapshot.restore(tmp_path / "index")
    assert len(index) == 4
    assert index.numbers.ranks == router.index.numbers.ranks


def test_requests_go_on_while_it_is_written_and_events_wait(router, tmp_path, monkeypatch):
    is_writing, may_end, steps = threading.Event(), threading.Event(), []
    write = snapshot.Snapshot.write

    def slow_write(self, path):
        is_writing.set()
        assert may_end.wait(10)
        steps.append("written")
        write(self, path)

    monkeypatch.setattr(snapshot.Snapshot, "write", slow_write)

    def apply():
        router.apply(Rank("b"), stored(200))
        steps.append("applied")

    writer = threading.Thread(target=router.save_index, args=(tmp_path / "index",))
    writer.start()
    assert is_writing.wait(10)
    follower = threading.Thread(target=apply)
    follower.start()
    assert router.route(TOKENS).rank == Rank("a")
    assert steps == []
    may_end.set()
    for thread in (writer, follower):
        thread.join(10)
    assert steps == ["written", "applied"]
    assert len(snapshot.restore(tmp_path / "index").engine_hashes_of(Rank("b"))) == 0
    assert len(router.index.engine_hashes_of(Rank("b"))) == 4


def test_a_fleet_with_several_indexes_is_rejected(router, tmp_path):
    router.add_worker("c", block_size=32)
    with pytest.raises(ConfigError):
        router.save_index(tmp_path / "index")
