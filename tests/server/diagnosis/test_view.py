"""Counts that grew of late."""

from collections import Counter

from kvplug.server.diagnosis.view import RecentCounts


def test_a_count_is_recent_until_the_window_ends_and_again_when_it_grows():
    recent, counts = RecentCounts(10.0), Counter(a=1)
    assert recent.of("w", counts, 0.0) == {"a": 1}
    assert recent.of("w", counts, 9.0) == {"a": 1}
    assert recent.of("w", counts, 10.0) == {}
    counts["a"] = 2
    assert recent.of("w", counts, 11.0) == {"a": 2}
    assert recent.of("other", Counter(a=2), 30.0) == {"a": 2}
    assert recent.of("w", counts, 30.0) == {}
