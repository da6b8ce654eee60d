"""What a process has counted outlives it."""

from kvplug.server.processes.last_page import LastPage, last_counters
from kvplug.server.processes.merging import merged
from kvplug.shared.folder import SharedFolder

PAGE = """
# HELP kvplug_requests_total requests
# TYPE kvplug_requests_total counter
kvplug_requests_total{{worker="a"}} {count}
# HELP kvplug_requests_in_flight running
# TYPE kvplug_requests_in_flight gauge
kvplug_requests_in_flight 2.0
# HELP kvplug_s seconds
# TYPE kvplug_s histogram
kvplug_s_bucket{{le="+Inf"}} {count}
kvplug_s_count {count}
kvplug_s_sum 5.0
"""


def values(text):
    return {each.name: each.value for family in merged([text]) for each in family.samples}


def counted(count, seconds):
    counts = dict.fromkeys(("kvplug_requests_total", "kvplug_s_bucket", "kvplug_s_count"), count)
    return {**counts, "kvplug_s_sum": seconds}


def test_who_takes_the_place_of_a_process_goes_on_with_its_counters(tmp_path):
    folder, running = SharedFolder(tmp_path), {"kvplug_requests_in_flight": 2.0}
    first = LastPage(folder, "reader0")
    assert values(first.turned(PAGE.format(count=3.0))) == counted(3.0, 5.0) | running
    assert values(first.turned(PAGE.format(count=4.0))) == counted(4.0, 5.0) | running
    assert values(last_counters(folder, "reader0")) == counted(4.0, 5.0)  # while it is away
    second = LastPage(folder, "reader0")
    assert values(last_counters(folder, "reader0")) == counted(4.0, 5.0)  # until it is asked
    assert values(second.turned(PAGE.format(count=1.0))) == counted(5.0, 10.0) | running
    third = LastPage(folder, "reader0")
    assert values(third.turned(PAGE.format(count=1.0))) == counted(6.0, 15.0) | running


def test_a_process_that_was_never_asked_leaves_nothing(tmp_path):
    assert last_counters(SharedFolder(tmp_path), "reader0") == ""


def test_what_cannot_be_kept_is_shown_all_the_same(tmp_path, caplog):
    page = LastPage(SharedFolder(tmp_path / "none"), "reader0")
    assert page.turned(PAGE.format(count=3.0)) == PAGE.format(count=3.0)
    assert "counters of reader0 cannot be kept: No such file" in caplog.text
