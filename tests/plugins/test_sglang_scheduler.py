"""What is hooked into SGLang's scheduler, around stand-ins; SGLang itself is in tests/engines."""

from types import SimpleNamespace

import pytest

from kvplug.engines import sglang_scheduler
from kvplug.engines.sglang_guard import objection
from kvplug.engines.sglang_scheduler import attach, publish_flush


class Publisher:
    def __init__(self, *, records=True):
        self.records = records
        self.contexts = []

    def begin_notes(self, page_size, *, is_dynamo):
        self.contexts.append((page_size, is_dynamo))

    def on_recorder_failed(self, error):
        raise AssertionError(error)


class Scheduler:
    """As far as hooks look at it."""

    def __init__(self, publisher, *, fails=False):
        self.fails, self.num_published = fails, 0
        self.kv_events_publisher = SimpleNamespace(
            kv_event_publisher=publisher, publish_kv_events=self._publish
        )
        self.tree_cache = SimpleNamespace(
            page_size=4, kv_events=SimpleNamespace(enabled=True, dynamo_format=True)
        )

    def _publish(self):
        self.num_published += 1
        if self.fails:
            raise RuntimeError("no more events")

    def process_batch_result(self, batch, result):
        return batch + result


@pytest.fixture
def recorders(monkeypatch):
    """What was put in; the guard has no objection."""
    found = []
    monkeypatch.setattr(sglang_scheduler, "objection", lambda owner: None)
    monkeypatch.setattr(sglang_scheduler, "recorder_for", lambda owner, failed: found.append(owner))
    return found


def test_each_step_and_each_flush_is_published(recorders):
    publisher = Publisher()
    scheduler = Scheduler(publisher)
    attach(None, scheduler)
    assert publisher.contexts == [(4, True)]
    assert recorders == [scheduler.tree_cache]
    assert scheduler.process_batch_result(1, result=2) == 3
    assert scheduler.num_published == 1
    publish_flush(True, scheduler, empty_cache=True)
    assert scheduler.num_published == 2


def test_a_step_that_cannot_be_published_is_let_go_of_and_named(recorders, caplog):
    scheduler = Scheduler(Publisher(), fails=True)
    attach(None, scheduler)
    for _ in range(2):
        assert scheduler.process_batch_result(1, 2) == 3
    publish_flush(True, scheduler)
    assert scheduler.num_published == 2
    assert caplog.text.count("when SGLang does so itself") == 1
    assert caplog.text.count("a flush is published late") == 1


def test_a_step_of_sglang_that_fails_fails(recorders):
    scheduler = Scheduler(Publisher())
    attach(None, scheduler)
    with pytest.raises(TypeError):
        scheduler.process_batch_result(1, "2")
    assert scheduler.num_published == 0


@pytest.mark.parametrize("publisher", [None, SimpleNamespace(publish=None)])
def test_the_schedulers_of_other_publishers_are_left_alone(publisher):
    scheduler = Scheduler(publisher)
    attach(None, scheduler)
    publish_flush(True, scheduler)
    assert "process_batch_result" not in vars(scheduler)
    assert scheduler.num_published == 0


def test_recorders_can_be_turned_off_and_steps_are_published_all_the_same(recorders):
    scheduler = Scheduler(Publisher(records=False))
    attach(None, scheduler)
    scheduler.process_batch_result(1, 2)
    assert (recorders, scheduler.num_published) == ([], 1)


def test_an_objection_of_the_guard_is_named_once_and_changes_nothing_else(monkeypatch, caplog):
    monkeypatch.setattr(sglang_scheduler, "objection", lambda owner: "SGLang 9 is not known")
    publisher = Publisher()
    scheduler = Scheduler(publisher)
    attach(None, scheduler)
    scheduler.process_batch_result(1, 2)
    assert (publisher.contexts, scheduler.num_published) == ([], 1)
    assert caplog.text.count("own recorder of KV events stays: SGLang 9 is not known") == 1


def test_a_scheduler_of_another_form_goes_on(caplog):
    scheduler = Scheduler(Publisher())
    del scheduler.tree_cache
    attach(None, scheduler)
    assert "in its own way" in caplog.text
    assert scheduler.process_batch_result(1, 2) == 3


def test_the_guard_without_sglang_objects():
    assert "it cannot be tried: ModuleNotFoundError" in objection(SimpleNamespace())
