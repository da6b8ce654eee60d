"""The fuzzer's short form, and whether it would find what it looks for."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug.events import AllBlocksCleared, EventBatch
from tests.fuzz import corpus
from tests.fuzz.mutate import Mutator
from tests.fuzz.run import fuzz
from tests.fuzz.target import TARGETS, FollowerTarget

CAPTURED = corpus.captured()
# As thorough as the properties: 2,000 messages with their 25 examples, 4,800 with 60.
NUM_MESSAGES = 80 * settings.default.max_examples


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_messages(target, monkeypatch):
    monkeypatch.setattr("tests.fuzz.run._CHECK_EVERY", NUM_MESSAGES // 2)
    report = fuzz(target, seed=1, count=NUM_MESSAGES)
    assert not report.failures, report.failures[0]
    assert report.num_accepted > 100
    assert len(report.rejected) > TARGETS[target].min_reasons


@pytest.fixture(scope="module")
def target():
    return FollowerTarget(random.Random(1))


edits = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 2), st.binary(max_size=3)), max_size=4
)


@given(st.sampled_from(CAPTURED), edits, st.integers(0, 9))
def test_any_edit_of_a_captured_message(target, payload, edits, number):
    damaged = bytearray(payload)
    for at, num_removed, inserted in edits:
        damaged[at : at + num_removed] = inserted
    target.feed_and_compare([b"kv@pod@model", number.to_bytes(8, "big"), bytes(damaged)])
    target.check()


@given(st.integers(0, 2**32))
def test_any_damage(target, seed):
    mutator = Mutator(random.Random(seed))
    for _ in range(5):
        target.feed_and_compare(mutator.frames(mutator.payload()))
    target.check()


class Careless(FollowerTarget):
    """Clears the rank whenever a message cannot be read, and tells nobody."""

    def read(self, frames):
        num_undecodable = self.follower.skipped["undecodable"]
        super().read(frames)
        if self.follower.skipped["undecodable"] > num_undecodable:
            self.router.index_of(self.follower.rank).apply(
                self.follower.rank, EventBatch(events=(AllBlocksCleared(),))
            )


class Crashing(FollowerTarget):
    def read(self, frames):
        super().read(frames)
        frames[2].decode()


class Leaking(FollowerTarget):
    """Grows by four times what is allowed in 500 messages."""

    def __init__(self, rng):
        super().__init__(rng)
        self.leak = []

    def read(self, frames):
        super().read(frames)
        self.leak.append(bytearray(2**17))


@pytest.mark.parametrize(("broken", "saying"), [(Careless, "refused, but"), (Crashing, "Error")])
def test_what_it_finds(monkeypatch, broken, saying):
    monkeypatch.setitem(TARGETS, "broken", broken)
    report = fuzz("broken", seed=1, count=2_000)
    assert saying in report.failures[0]
    assert "message: [" in report.failures[0]


def test_it_finds_memory_that_grows(monkeypatch):
    monkeypatch.setitem(TARGETS, "broken", Leaking)
    monkeypatch.setattr("tests.fuzz.run._WARM_UP", 0)
    monkeypatch.setattr("tests.fuzz.run._CHECK_EVERY", 500)
    [failure] = fuzz("broken", seed=1, count=1_000).failures
    assert failure.startswith("memory grew by")


def test_generated_batches_are_all_understood():
    rng = random.Random(1)
    target = TARGETS["follower"](rng)
    for number in range(300):
        payload = msgspec.msgpack.encode(corpus.generated(rng))
        target.read([b"", number.to_bytes(8, "big"), payload])
    assert not {"undecodable", "bad_field", "not_an_event"} & set(target.follower.skipped)
