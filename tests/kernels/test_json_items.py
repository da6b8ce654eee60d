import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels.json_items import INCOMPLETE, WORDS_PER_ITEM, find_items
from tests.kernels import references

# Text with every byte that the kernel looks at.
texts = st.text(alphabet='"\\\\[]{}:, ab\u00e9\n', max_size=8)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=20,
)
containers = st.lists(values, max_size=5) | st.dictionaries(texts, values, max_size=5)


def items_of(text, limit=50):
    out = np.empty(limit * WORDS_PER_ITEM, dtype=np.int64)
    count = find_items(np.frombuffer(text, dtype=np.uint8), out)
    if count == INCOMPLETE:
        return None
    return [tuple(item) for item in out.reshape(limit, WORDS_PER_ITEM)[:count].tolist()]


@given(containers)
def test_items_are_where_the_standard_decoder_finds_them(value):
    text = json.dumps(value, separators=(",", ":"))
    assert items_of(text.encode()) == references.json_items(text)


@given(containers, st.integers(1, 3))
def test_white_space_belongs_to_the_items(value, indent):
    text = json.dumps(value, indent=indent)
    found = [json.loads(text[begin:end]) for begin, end, _ in items_of(text.encode())]
    flat = value if isinstance(value, list) else [x for pair in value.items() for x in pair]
    assert found == flat


@given(containers, st.integers(1, 4))
def test_no_more_items_are_read_than_there_is_room_for(value, limit):
    text = json.dumps(value, separators=(",", ":"))
    assert items_of(text.encode(), limit) == references.json_items(text)[:limit]


@given(containers, st.data())
def test_a_text_that_ends_early_is_incomplete(value, data):
    text = json.dumps(value).encode()
    assert items_of(text[: data.draw(st.integers(1, len(text) - 1))]) is None


@given(st.binary(min_size=1, max_size=40))
def test_any_bytes_end(text):
    items_of(b"[" + text)


@pytest.mark.parametrize("text", [b"[]", b"{ }", b"[\n]"])
def test_what_is_empty_has_no_items(text):
    assert items_of(text) == []
