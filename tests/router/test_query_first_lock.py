"""Queries go between two slices of ingestion, and ingestion excludes other ingestion."""

import threading
import time

import pytest

from kvplug.router.query_first_lock import QueryFirstLock

TIMEOUT_S = 10.0


def test_a_query_waits_for_one_slice_only():
    lock, log = QueryFirstLock(), []
    held, asked = threading.Event(), threading.Event()

    def ingest():
        with lock.low_priority as turn:
            for number in range(3):
                log.append(number)
                held.set()
                asked.wait(TIMEOUT_S)
                while number == 0 and not lock.query_waiting[0]:
                    pass  # the query is about to ask
                turn.yield_to_queries()

    thread = threading.Thread(target=ingest)
    thread.start()
    held.wait(TIMEOUT_S)
    asked.set()
    with lock:
        log.append("query")
    thread.join(TIMEOUT_S)
    assert log == [0, "query", 1, 2]


def test_ingestion_excludes_ingestion_over_all_its_slices():
    lock, log = QueryFirstLock(), []
    began = threading.Barrier(2)

    def ingest(name):
        began.wait(TIMEOUT_S)
        with lock.low_priority as turn:
            for _ in range(50):
                log.append(name)
                turn.yield_to_queries()

    threads = [threading.Thread(target=ingest, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert "".join(log) in ("a" * 50 + "b" * 50, "b" * 50 + "a" * 50)


def test_an_exception_leaves_the_lock_free():
    lock = QueryFirstLock()
    for context in (lock, lock.low_priority):
        with pytest.raises(ValueError, match="inside"), context:
            raise ValueError("inside")
    with lock:
        pass
    with lock.low_priority:
        pass


class Counted:
    """Threads that come into one lock in every way, and how many were in it at once."""

    def __init__(self):
        self.lock, self.num_inside, self.num_seen = QueryFirstLock(), 0, []

    def enter_and_leave(self):
        self.num_inside += 1
        self.num_seen.append(self.num_inside)
        time.sleep(0)  # another thread may look meanwhile
        self.num_inside -= 1

    def query(self):
        for _ in range(150):
            with self.lock:
                self.enter_and_leave()

    def ingest(self):
        for _ in range(50):
            with self.lock.low_priority as turn:
                for _ in range(3):
                    self.enter_and_leave()
                    turn.yield_to_queries()
                with turn.released():
                    pass


def test_threads_exclude_each_other_however_the_lock_changes_hands():
    counted = Counted()
    targets = (counted.query, counted.query, counted.ingest, counted.ingest)
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(counted.num_seen) == 2 * 150 + 2 * 50 * 3
    assert set(counted.num_seen) == {1}
    with counted.lock:  # it is free
        pass
