from collections import Counter

from kvplug.index.apply_result import ApplyResult, RejectReason


def test_its_repr_has_everything_and_reading_changes_nothing():
    some, same, none = ApplyResult(num_stored=1), ApplyResult(num_stored=1), ApplyResult()
    for result in (some, same):
        result.reject(RejectReason.NO_TOKENS, 3)
    assert "num_stored=1" in repr(some)
    assert "rejected={'no_tokens': 3}" in repr(some)
    assert "rejected={}" in repr(none)
    assert some.rejected == Counter(no_tokens=3)
    assert none.rejected == Counter()
    assert some == same
    assert none == ApplyResult()
    assert some != ApplyResult(num_stored=1)


def test_what_was_not_refused_is_no_difference():
    result = ApplyResult()
    result.reject(RejectReason.NO_TOKENS, 0)
    assert result == ApplyResult()
