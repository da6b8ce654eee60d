import pytest

from kvplug.ingest.sequence import Arrival, SequenceTracker


@pytest.mark.parametrize(
    ("numbers", "arrivals", "num_missed"),
    [
        ([0, 1, 2], [Arrival.IN_ORDER] * 3, 0),
        ([5, 6], [Arrival.LATE_JOIN, Arrival.IN_ORDER], 0),
        ([0, 1, 1], [Arrival.IN_ORDER, Arrival.IN_ORDER, Arrival.DUPLICATE], 0),
        ([0, 4, 5, 7], [Arrival.IN_ORDER, Arrival.GAP, Arrival.IN_ORDER, Arrival.GAP], 4),
        ([0, 1, 0, 1], [Arrival.IN_ORDER] * 2 + [Arrival.RESTART, Arrival.IN_ORDER], 0),
        ([None, 0], [Arrival.UNNUMBERED, Arrival.IN_ORDER], 0),
    ],
)
def test_each_number_is_classified_by_the_one_before(numbers, arrivals, num_missed):
    tracker = SequenceTracker()
    assert [tracker.observe(number) for number in numbers] == arrivals
    assert tracker.num_missed == num_missed


def test_after_a_reset_the_stream_begins_anew():
    tracker = SequenceTracker()
    tracker.observe(7)
    tracker.reset()
    assert tracker.observe(0) is Arrival.IN_ORDER
