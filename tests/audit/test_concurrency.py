"""Requests, events and changes of the fleet at once: requests wait for one slice of the others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from kvplug import BlockRemoved, BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.audit import audit as audit_module
from kvplug.audit.audit import Audit, Usage
from kvplug.index.sweeping import Clearing
from kvplug.packed import PackedStored, encode
from kvplug.router import followed_fleet, saved_fleet
from tests.plugins.stock_client import wait_until

BLOCK, NUM_PROMPTS = 4, 3000
RANK = Rank("a")
LAST = [NUM_PROMPTS] * BLOCK
PATIENCE_S = 120  # the first call of a kernel compiles it


def prompts_stored(first=1, last=NUM_PROMPTS):
    """Prompts of one block each, which have nothing in common."""
    events = tuple(
        BlockStored(block_hashes=(number,), token_ids=(number,) * BLOCK, block_size=BLOCK)
        for number in range(first, last + 1)
    )
    return EventBatch(events=events)


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=BLOCK))
    router.add_worker("a")
    return router


class WitnessedAudit(Audit):
    """Notes how many slices were done when it was told of a decision."""

    slices, num_before = None, None

    def on_decision(self, decision, request):
        super().on_decision(decision, request)
        if self.slices is not None:
            self.num_before = self.slices.num_done


@pytest.fixture
def audit(router):
    return WitnessedAudit(router)


class Slices:
    """Counts the slices that a thread is through with; the first one ends when somebody waits."""

    def __init__(self, router):
        self.num_done, self.has_begun = 0, threading.Event()
        self._query_waiting = router._lock.query_waiting

    def watch(self, function):
        def watched(*arguments):
            self.has_begun.set()
            result = function(*arguments)
            if not self.num_done:
                wait_until(lambda: self._query_waiting[0], "a request waits")
            self.num_done += 1
            return result

        return watched


@pytest.fixture
def slices(router, audit, monkeypatch):
    """Of a clear of many blocks."""
    router.apply(RANK, prompts_stored())
    slices = audit.slices = Slices(router)
    monkeypatch.setattr(Clearing, "advance", slices.watch(Clearing.advance))
    return slices


@contextmanager
def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_request_goes_between_two_slices_of_a_clear(router, audit, slices):
    with in_thread(router.clear, RANK):
        assert slices.has_begun.wait(PATIENCE_S)
        decision = router.route(LAST)
    assert audit.num_before == 1 < slices.num_done
    assert (decision.overlap_blocks, len(router.index)) == (1, 0)  # it was the last to go
    router.finish(decision.request_id)
    audit.answered(decision.request_id, Usage(prompt_tokens=BLOCK, cached_tokens=0))
    [expectation] = [answer.expectation for answer in audit._answers]
    assert expectation.lowest == 0  # that its block went is known
    router.index.check()


@pytest.mark.parametrize("kind", ["stored", "removed"])
def test_a_request_goes_between_two_slices_of_a_batch(router, audit, monkeypatch, kind):
    batch = prompts_stored()
    if kind == "removed":
        router.apply(RANK, batch)
        batch = EventBatch(
            events=tuple(BlockRemoved(block_hashes=event.block_hashes) for event in batch.events)
        )
    slices = audit.slices = Slices(router)
    fleet_index = router.fleet_index
    monkeypatch.setattr(fleet_index, "apply", slices.watch(fleet_index.apply))
    with in_thread(router.apply, RANK, batch):
        assert slices.has_begun.wait(PATIENCE_S)
        router.route(LAST)
    num_slices = -(-NUM_PROMPTS // followed_fleet._EVENTS_PER_SLICE)
    assert audit.num_before == 1 < slices.num_done == num_slices
    assert len(router.index) == (NUM_PROMPTS if kind == "stored" else 0)
    router.index.check()


def test_a_fleet_changes_before_or_after_a_clear(router, slices, monkeypatch):
    seen, advance = [], Clearing.advance
    monkeypatch.setattr(
        Clearing, "advance", lambda *arguments: advance(*arguments) or seen.append(router.ranks)
    )
    with in_thread(router.clear, RANK):
        assert slices.has_begun.wait(PATIENCE_S)
        with in_thread(router.remove_worker, "a"), router.locked():
            assert router.ranks == [RANK]
    assert len(seen) > 2
    assert all(ranks == [RANK] for ranks in seen)
    assert (router.ranks, len(router.index)) == ([], 0)


def test_an_index_is_saved_while_requests_go_and_events_wait(router, audit, tmp_path, monkeypatch):
    router.apply(RANK, prompts_stored(last=10))
    is_writing, may_end = threading.Event(), threading.Event()

    def write(snapshot, path):
        is_writing.set()
        assert may_end.wait(PATIENCE_S)

    monkeypatch.setattr(saved_fleet.Snapshot, "write", write)
    with in_thread(router.save_index, tmp_path / "index"):
        assert is_writing.wait(PATIENCE_S)
        with in_thread(router.apply, RANK, prompts_stored(11, 20)):
            router.route(LAST)
            assert len(router.index) == 10
            may_end.set()
    assert len(router.index) == 20


def route_all(router, audit, number):
    for at in range(60):
        prompts = [[(number + at + i) % 50 + 1] * 2 * BLOCK for i in range(3)]
        many = router.route_many(prompts[1:], workers=("a", "b"))
        for decision in (router.route(prompts[0], workers=("a", "b")), *many):
            router.first_token(decision.request_id)
            router.finish(decision.request_id, 5)
            if audit is not None:
                audit.answered(decision.request_id, Usage(2 * BLOCK, at % 3 * BLOCK))
                audit.exclude(decision, "by its kind")


def tell_all(router, audit, worker):
    for at in range(60):
        first = at % 40 + 1
        router.apply(Rank(worker), prompts_stored(first, first + 5))
        if at % 7 == 0:
            router.clear(Rank(worker))


def change_all(router, audit, worker):
    for at in range(30):
        router.add_worker(worker)
        router.set_cache_capacity(Rank(worker), 100)
        router.apply(Rank(worker), prompts_stored(at + 1, at + 20))
        names = np.arange(at, at + 30, dtype=np.uint64) + np.uint64(10_000)
        router.apply_packed(Rank(worker), encode([PackedStored(names, names, None)]))
        router.remove_worker(worker)


def test_packed_events_come_before_or_after_a_clear(router, slices):
    names = np.arange(5000, dtype=np.uint64) + np.uint64(10_000)
    payload = encode([PackedStored(names, names, None)])
    with in_thread(router.clear, RANK):
        assert slices.has_begun.wait(PATIENCE_S)
        with in_thread(router.apply_packed, RANK, payload), router.locked():
            assert len(router.index) <= NUM_PROMPTS  # none of the packed ones
    assert len(router.index) == len(names)
    router.index.check()


def look_all(router, audit, worker):
    for _ in range(30 if audit is not None else 0):
        audit.ledgers()
        assert 0 < audit.accuracy(Rank(worker)) < 1


@pytest.mark.parametrize("is_audited", [False, True])
def test_threads_that_route_tell_and_change_the_fleet_do_not_collide(is_audited, monkeypatch):
    monkeypatch.setattr(followed_fleet, "_EVENTS_PER_SLICE", 2)
    monkeypatch.setattr(followed_fleet, "_SLOTS_PER_SLICE", 8)
    monkeypatch.setattr(audit_module, "_GRACE_S", 1e-6)
    router = Router(RouterConfig(block_size=BLOCK))
    audit = Audit(router) if is_audited else None
    for worker in "ab":
        router.add_worker(worker)
    work = [(route_all, 0), (route_all, 1), (route_all, 2)]
    work += [(tell_all, "a"), (tell_all, "b"), (change_all, "c"), (look_all, "a")]
    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(each, router, audit, argument) for each, argument in work]:
            done.result(60)
    router.index.check()
    assert len(router.load) == 0
    assert router.ranks == [Rank("a"), Rank("b")]
    if is_audited:
        assert set(audit.ledgers()) == {Rank("a"), Rank("b")}
        assert audit._expected == {}


def test_a_request_goes_between_two_slices_of_answers_that_are_judged(router, audit, monkeypatch):
    monkeypatch.setattr(audit_module, "_GRACE_S", 1e-6)
    router.apply(RANK, prompts_stored(last=100))
    for number in range(1, 101):
        decision = router.route([number] * BLOCK)
        router.finish(decision.request_id)
        with monkeypatch.context() as unsettled:
            unsettled.setattr(audit, "_settle", lambda: None)
            audit.answered(decision.request_id, Usage(BLOCK, 0))
    slices = audit.slices = Slices(router)
    monkeypatch.setattr(audit, "_settle_slice", slices.watch(audit._settle_slice))
    with in_thread(audit.ledgers):
        assert slices.has_begun.wait(PATIENCE_S)
        router.route(LAST)
    assert audit.num_before == 1 < slices.num_done == 1 + 100 // audit_module._ANSWERS_PER_SLICE
    assert audit.ledgers()[RANK].num_audited == 100
