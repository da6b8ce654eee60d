"""Notes of SGLang's trees to its events, held against the formulas by hashlib alone.

SGLang itself makes the same events in tests/engines/test_sglang_recorder.py.
"""

import hashlib
import struct

import msgspec
import pytest

from kvplug.engines.sglang_notes import (
    Expander,
    NotesError,
    callers_key,
    namespace_seed,
)
from kvplug.events import salt_with_extra_key

PAGE = 2
LORA_ID = "0123456789abcdef" * 2
CLEARED = ("all_blocks_cleared",)


def expander(**more):
    context = {"page_size": PAGE, "dynamo_format": False, "names_extra_keys": False}
    return Expander(context | more)


def expand(*items, with_=None, **more):
    """As in a sender: off the wire."""
    on_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(items))
    return (with_ or expander(**more)).expand(on_wire)


def node(number, parent, tokens, *, bigram=False, key=None, salt=None, lora=None):
    return (number, parent, struct.pack(f"<{len(tokens)}q", *tokens), bigram, key, salt, lora)


def stored(*args, medium="GPU", session=None, **more):
    return ("node_stored", medium, session, *node(*args, **more))


def sha256(content):
    return hashlib.sha256(content).digest()


def chain(tokens, seed=b""):
    """The digests of pages of plain tokens."""
    digests = []
    for first in range(0, len(tokens), PAGE):
        seed = sha256(seed + struct.pack(f"<{PAGE}I", *tokens[first : first + PAGE]))
        digests.append(seed)
    return digests


def name(digest):
    return int.from_bytes(digest[:8], "big", signed=True)


def in_namespace(number, **namespace):
    seed = namespace_seed(namespace.get("key"), namespace.get("salt"))
    return name(sha256(seed + number.to_bytes(8, "big", signed=True)))


def test_a_node_is_one_event_in_the_order_of_sglangs_fields():
    first, second = map(name, chain([1, 2, 3, 4]))
    [event] = expand(stored(5, None, [1, 2, 3, 4]))
    assert list(event.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [first, second]),
        ("parent_block_hash", None),
        ("token_ids", [1, 2, 3, 4]),
        ("block_size", PAGE),
        ("lora_id", None),
        ("medium", "GPU"),
    ]


def test_children_are_chained_to_what_a_split_left_of_their_parent():
    names = list(map(name, chain([1, 2, 3, 4, 5, 6])))
    other = list(map(name, chain([1, 2, 9, 9])))
    split = ("node_split", 6, 5, 1)
    events = expand(
        stored(5, None, [1, 2, 3, 4]),
        split,
        stored(7, 6, [9, 9]),
        stored(8, 5, [5, 6]),
        ("node_removed", 5, "GPU", True),
    )
    assert [event["block_hashes"] for event in events] == [
        names[:2], other[1:], names[2:], names[1:2],
    ]  # fmt: skip
    assert [event.get("parent_block_hash") for event in events] == [None, names[0], names[1], None]


def test_neighbours_are_joined_where_sglang_joins_them():
    removed = ("node_removed", 6, "GPU", True), ("node_removed", 5, "GPU", True)
    events = expand(stored(5, None, [1, 2]), stored(6, 5, [3, 4]), *removed)
    names = list(map(name, chain([1, 2, 3, 4])))
    assert [event["block_hashes"] for event in events] == [names, names[::-1]]
    assert events[0]["token_ids"] == [1, 2, 3, 4]
    apart = expand(stored(5, None, [1, 2]), stored(6, 5, [3, 4], medium="CPU_PINNED"))
    assert [event["medium"] for event in apart] == ["GPU", "CPU_PINNED"]
    apart = expand(stored(5, None, [1, 2]), CLEARED, stored(5, None, [1, 2]))
    assert len(apart) == 3


def test_stock_events_stay_and_are_not_joined():
    stock = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    both = expander()
    expand(stored(5, None, [1, 2]), with_=both)
    events = expand(stock, ("node_removed", 5, "GPU", True), with_=both)
    assert events[0] == stock
    assert len(events) == 2


def test_pairs_and_tokens_beyond_32_bits():
    [event] = expand(stored(5, None, [1, 2, 3], bigram=True))
    assert event["token_ids"] == [[1, 2], [2, 3]]
    assert event["block_hashes"] == [name(sha256(struct.pack("<4I", 1, 2, 2, 3)))]
    [event] = expand(stored(5, None, [1, 2**40]))
    assert event["block_hashes"] == [name(sha256(b"\xff" + struct.pack("<2Q", 1, 2**40)))]


def test_a_node_whose_parent_was_never_stored_is_chained_to_it():
    names = list(map(name, chain([1, 2, 3, 4])))
    [event] = expand(("node", *node(5, None, [1, 2])), stored(6, 5, [3, 4]))
    assert (event["parent_block_hash"], event["block_hashes"]) == (names[0], names[1:])


def salted(tokens, salt):
    return [name(digest) for digest in chain(tokens, sha256(b"sglang-cache-salt-v1\0" + salt))]


@pytest.mark.parametrize(
    ("namespace", "default", "dynamo"),
    [
        ({"salt": "s"}, lambda n, s: s, lambda n, s: in_namespace(s, salt="s")),
        ({"key": "k"}, lambda n, s: n, lambda n, s: in_namespace(n, key="k")),
        (
            {"key": "k", "salt": "s"},
            lambda n, s: s,
            lambda n, s: in_namespace(s, key="k", salt="s"),
        ),
        (
            {"key": LORA_ID, "lora": "a"},
            lambda n, s: in_namespace(n, key=LORA_ID),
            lambda n, s: in_namespace(n, key=LORA_ID),
        ),
    ],
)
def test_names_in_namespaces(namespace, default, dynamo):
    [plain], [with_salt] = map(name, chain([1, 2])), salted([1, 2], b"s")
    for is_dynamo, expected in ((False, default), (True, dynamo)):
        gone = ("node_removed", 5, "GPU", True)
        events = expand(stored(5, None, [1, 2], **namespace), gone, dynamo_format=is_dynamo)
        assert [event["block_hashes"] for event in events] == [[expected(plain, with_salt)]] * 2
        assert events[0].get("cache_salt") == namespace.get("salt")
        assert events[0].get("lora_name") == namespace.get("lora")


def tuples(key, lora=(), salt=None):
    return (
        ("block_stored", [7, 8], 6, [1, 2, 3, 4], PAGE, "GPU", salt, "session", key, *lora),
        ("block_removed", [7], "CPU_PINNED", key, *lora),
        CLEARED,
    )


def test_tuples_of_the_rust_tree_keep_what_is_hashed():
    first, second, third = expand(*tuples(None))
    assert list(first.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [7, 8]),
        ("parent_block_hash", 6),
        ("token_ids", [1, 2, 3, 4]),
        ("block_size", PAGE),
        ("lora_id", None),
        ("medium", "GPU"),
        ("session_id", "session"),
    ]
    assert second == {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU_PINNED"}
    assert third == {"type": "AllBlocksCleared"}
    assert expand(*tuples("k"))[0]["block_hashes"] == [7, 8]


def test_an_adapter_has_names_of_its_own_but_in_dynamos_format_which_has_them_already():
    stored_event, removed, _ = expand(*tuples(LORA_ID, ("a",)))
    names = [in_namespace(number, key=LORA_ID) for number in (6, 7, 8)]
    assert [stored_event["parent_block_hash"], *stored_event["block_hashes"]] == names
    assert (stored_event["lora_name"], removed["block_hashes"]) == ("a", names[1:2])
    assert expand(*tuples(LORA_ID, ("a",)), dynamo_format=True)[1]["block_hashes"] == [7]


@pytest.mark.parametrize("is_dynamo", [False, True])
def test_an_extra_key_becomes_a_salt_on_our_wire_and_gives_names_of_its_own(is_dynamo):
    said = {"names_extra_keys": True, "dynamo_format": is_dynamo}
    first, removed, _ = expand(*tuples("k", salt="s"), **said)
    assert first["cache_salt"] == salt_with_extra_key("s", "k")
    expected = 7 if is_dynamo else in_namespace(7, key="k")
    assert (first["block_hashes"][0], removed["block_hashes"][0]) == (expected, expected)
    of_node, gone = expand(
        stored(5, None, [1, 2], key="k"), ("node_removed", 5, "GPU", True), **said
    )
    assert of_node["block_hashes"] == gone["block_hashes"] != expand(stored(5, None, [1, 2]))
    assert of_node["cache_salt"] == salt_with_extra_key("", "k")
    adapter, _, _ = expand(*tuples("k" + LORA_ID, ("a",)), **said)
    assert (adapter["cache_salt"], adapter["lora_name"]) == (salt_with_extra_key("", "k"), "a")
    adapter, _, _ = expand(*tuples(LORA_ID, ("a",)), **said)
    assert "cache_salt" not in adapter


def test_the_callers_key_is_without_the_adapters_id():
    assert callers_key("k" + LORA_ID, "a") == "k"
    assert callers_key("k" + LORA_ID, None) == "k" + LORA_ID
    assert callers_key(LORA_ID + "|more", "a") == LORA_ID + "|more"
    assert callers_key("", None) == ""


def test_what_is_not_known_is_said_once_and_then_left_out_until_all_is_cleared():
    lost = expander()
    with pytest.raises(NotesError, match="node_removed"):
        expand(("node_removed", 5, "GPU", False), with_=lost)
    unknown = stored(6, 5, [3, 4]), ("node_split", 8, 5, 1), ("node_gone", 5)
    assert expand(*unknown, with_=lost) == []
    assert len(expand(stored(7, None, [1, 2]), with_=lost)) == 1
    expand(CLEARED, with_=lost)
    with pytest.raises(NotesError):
        expand(stored(6, 5, [3, 4]), with_=lost)


def test_after_lost_batches_nodes_are_unknown():
    lost = expander()
    expand(stored(5, None, [1, 2]), with_=lost)
    lost.forget()
    assert expand(stored(6, 5, [3, 4]), with_=lost) == []


@pytest.mark.parametrize(
    "item",
    [
        ("unheard_of", 1),
        ("block_stored", [7], None),
        ("node_stored", "GPU", None, 5),
        stored(5, None, [1, 2, 3]),
        stored(5, None, []),
        ("all_blocks_cleared", 1),
    ],
)
def test_a_note_of_another_form_is_an_error(item):
    with pytest.raises(NotesError, match="cannot be used"):
        expand(item)
