"""Items of msgpack are passed over as msgspec reads them."""

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from kvplug.kernels._jit import i8, kernel, reads, u1
from kvplug.kernels.msgpack import FAILED, PADDING, after_item

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=300),
)
scalars_as_keys = st.text(max_size=3) | st.integers(0, 99)
items = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(scalars_as_keys, inner, max_size=5)
    ),
)


@kernel(i8(reads(u1), i8))
def end_of(data, end):
    return after_item(data, 0, end)


def passed(payload):
    data = np.frombuffer(payload + bytes(PADDING), dtype=np.uint8)
    return end_of(data, len(payload))


@given(items, st.binary(max_size=9))
def test_an_item_ends_where_the_next_begins(item, more):
    payload = encode(item)
    assert passed(payload + more) == len(payload)


@given(items)
def test_an_item_that_is_cut_short_has_no_end(item):
    payload = encode(item)
    assert passed(payload[:-1]) == FAILED


@given(st.binary(max_size=40))
def test_any_bytes_are_passed_over_or_not(payload):
    end = passed(payload)
    if end == FAILED:
        return
    assert 0 < end <= len(payload)
    # Not a text that is no UTF-8, nor a map with a list as a key: none of ours has them.
    with suppress(UnicodeDecodeError, TypeError, msgspec.ValidationError):
        msgspec.msgpack.decode(payload[:end])


@pytest.mark.parametrize("length", [100, 2**8, 2**16, 2**17])
def test_long_items(length):
    for item in ("x" * length, bytes(length), [None] * length, {str(n): n for n in range(length)}):
        payload = encode(item)
        assert passed(payload) == len(payload)
        assert passed(payload[:-1]) == FAILED


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b"\xd4\1\1"]
)
def test_lengths_beyond_the_payload_and_extensions_have_no_end(head):
    assert passed(head + bytes(40)) == FAILED
