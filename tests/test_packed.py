"""Packed events: what goes in comes out, and what is no payload is refused in one sentence."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import packed
from kvplug.errors import DecodeError
from kvplug.events import CxlMetadata, CxlState, MoeLabel, Tier

words = st.lists(st.integers(0, 2**64 - 1), max_size=5)
tiers = st.sampled_from(Tier)
u64 = st.integers(0, 2**64 - 1)
parents = st.none() | u64
groups = st.integers(0, 2**16 - 1)
kinds = (groups, st.sampled_from(["full_attention", "mamba"]), st.none() | st.integers(0, 99))
pools, workers = st.none() | st.integers(0, 9), st.none() | st.tuples(st.text(), st.text())
states = st.sampled_from(CxlState)
events = st.one_of(
    st.builds(packed.PackedStored, words, words, parents, tiers, u64),
    st.builds(
        packed.PackedStored, words, words, parents, tiers, u64, *kinds,
        st.none() | st.integers(1, 99), st.none() | st.booleans(),
        st.none() | st.builds(CxlMetadata, states, pools, workers),
        st.none() | st.builds(MoeLabel, groups, groups, groups),
    ),
    st.builds(packed.PackedRemoved, words, tiers, groups),
    st.builds(packed.PackedCleared, st.none() | tiers),
    st.builds(packed.PackedCopied, words, tiers, *kinds),
    st.builds(packed.PackedTransition, words, states, pools, workers),
    st.builds(packed.PackedAdapter, u64, st.text(min_size=1)),
)  # fmt: skip
KINDS = {
    packed.PackedStored: packed.STORED,
    packed.PackedRemoved: packed.REMOVED,
    packed.PackedCleared: packed.CLEARED,
    packed.PackedCopied: packed.COPIED,
    packed.PackedTransition: packed.TRANSITION,
    packed.PackedAdapter: packed.ADAPTER,
}


def as_lists(event):
    fields = [getattr(event, name) for name in event.__dataclass_fields__]
    return [field.tolist() if isinstance(field, np.ndarray) else field for field in fields]


@given(st.lists(events, max_size=40))
def test_what_goes_in_comes_out(some):
    payload = packed.encode(some)
    assert [as_lists(event) for event in packed.decode(payload)] == [as_lists(one) for one in some]
    assert packed.num_events(payload) == len(some)
    assert packed.kinds_of(payload) == [KINDS[type(each)] for each in some]


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "truncated"),
        (b"\x90", r"expected an array, got \[\]"),
        (b"\x81\x01\x02", "expected an array, got {1: 2}"),
        (msgspec.msgpack.encode([1]), "expected version 2, got 1"),
        (msgspec.msgpack.encode([2, [9, 0]]), "expected an event of a kind and form"),
        (msgspec.msgpack.encode([2, [1, 3, b""]]), "3 is not a valid Tier"),
        (msgspec.msgpack.encode([2, [1, 0, b"1234567"]]), "multiple of element size"),
        (msgspec.msgpack.encode([2, [0, 0, -1, 0, b"", b""]]), r"in \[0, 2\*\*64\), got -1"),
        (msgspec.msgpack.encode([2, [0, 0, 1, 0, b"", b"", {"group": -1}]]), r"a group in \[0"),
        (msgspec.msgpack.encode([2, [0, 0, 1, 0, b"", b"", {"cxl": 5}]]), "got `int`"),
        (msgspec.msgpack.encode([2, [3, 0, b""]]), "missing 1 required"),
        (msgspec.msgpack.encode([2, [4, "melted", None, None, b""]]), "not a valid CxlState"),
        (msgspec.msgpack.encode([2, [4, "evicted", "x", None, b""]]), "got `str`"),
        (msgspec.msgpack.encode([2, [5, -1, "lora"]]), r"in \[0, 2\*\*64\), got -1"),
        (msgspec.msgpack.encode([2, [[], 0]]), "unhashable"),
        (msgspec.msgpack.encode([2, [1, 0, b""]]) + b"\x00", "trailing"),
        (b"\x91" * 5000, "recursion"),
    ],
)
def test_what_is_no_payload_is_rejected(payload, says):
    with pytest.raises(DecodeError, match=f"cannot read packed events: .*{says}"):
        packed.decode(payload)


@given(st.lists(st.lists(events, max_size=20), min_size=1, max_size=4))
def test_payloads_are_joined_in_order(some):
    whole, num_joined = packed.joined([packed.encode(each) for each in some])
    assert num_joined == len(some)
    assert list(map(as_lists, packed.decode(whole))) == [as_lists(e) for each in some for e in each]


@pytest.mark.parametrize(
    "odd",
    [b"", b"\x90", b"\x91", b"\x91\x01", b"\x91\xcc\x02", b"\xdc\x00", b"\x81\x02", bytes(2**18)],
)
def test_what_has_another_head_is_not_joined(odd):
    plain = packed.encode([])
    assert packed.joined([odd, plain, plain]) == (odd, 1)
    whole, num_joined = packed.joined([plain, plain, odd, plain])
    assert (packed.decode(whole), num_joined) == ([], 2)


def test_what_is_joined_has_a_limit():
    long = packed.encode([packed.PackedRemoved(range(10_000))])
    whole, num_joined = packed.joined([long] * 9)
    assert num_joined == 3
    assert len(whole) < 2**18


def test_details_that_are_not_known_are_passed_over():
    details = {"group": 3, "colour": "blue"}
    payload = msgspec.msgpack.encode([2, [0, 0, None, 7, b"", b"", details]])
    assert packed.decode(payload)[0].group == 3
