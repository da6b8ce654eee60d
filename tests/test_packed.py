"""Packed events: what goes in comes out, and what is no payload is refused in one sentence."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import packed
from kvplug.errors import DecodeError
from kvplug.events import Tier

words = st.lists(st.integers(0, 2**64 - 1), max_size=5)
tiers = st.sampled_from(Tier)
parents = st.none() | st.integers(0, 2**64 - 1)
events = st.one_of(
    st.builds(packed.PackedStored, words, words, parents, tiers, st.integers(0, 2**64 - 1)),
    st.builds(packed.PackedRemoved, words, tiers),
    st.builds(packed.PackedCleared, st.none() | tiers),
)


def as_lists(event):
    fields = [getattr(event, name) for name in event.__dataclass_fields__]
    return [field.tolist() if isinstance(field, np.ndarray) else field for field in fields]


@given(st.lists(events, max_size=40))
def test_what_goes_in_comes_out(some):
    payload = packed.encode(some)
    assert [as_lists(event) for event in packed.decode(payload)] == [as_lists(one) for one in some]
    assert packed.num_events(payload) == len(some)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "truncated"),
        (b"\x90", r"expected an array, got \[\]"),
        (b"\x81\x01\x02", "expected an array, got {1: 2}"),
        (msgspec.msgpack.encode([2]), "expected version 1, got 2"),
        (msgspec.msgpack.encode([1, [3, 0]]), "expected a stored, removed or cleared event"),
        (msgspec.msgpack.encode([1, [1, 3, b""]]), "3 is not a valid Tier"),
        (msgspec.msgpack.encode([1, [1, 0, b"1234567"]]), "multiple of element size"),
        (msgspec.msgpack.encode([1, [0, 0, -1, 0, b"", b""]]), r"in \[0, 2\*\*64\), got -1"),
        (msgspec.msgpack.encode([1, [1, 0, b""]]) + b"\x00", "trailing"),
    ],
)
def test_what_is_no_payload_is_rejected(payload, says):
    with pytest.raises(DecodeError, match=f"cannot read packed events: .*{says}"):
        packed.decode(payload)
