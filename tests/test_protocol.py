"""Messages of our own stream: what goes in comes out, and what is none is refused by name."""

import ast
import re

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode as pack

from kvplug import packed
from kvplug.engines.block_hashes import BlockHashes
from kvplug.errors import DecodeError
from kvplug.events import Namespace
from kvplug.hashing import BlockHasher, seed_of
from kvplug.protocol import (
    MAJOR,
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    MINOR,
    Ask,
    End,
    Events,
    GroupAbout,
    Hello,
    ProtocolError,
    Resident,
    WorkerHello,
    decode,
    encode,
    is_ours,
)
from tests.documentation import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text()

u64, numbers = st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)
times = st.floats(0, 2**40)
parts = st.integers(1, MAX_PARTS).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))
abouts = st.builds(
    WorkerHello,
    engine=st.text(max_size=9),
    block_size=st.none() | st.integers(1, 64),
    groups=st.lists(st.builds(GroupAbout, group=st.integers(0, 9)), max_size=3).map(tuple),
    topology=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    cxl_pools=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    defects=st.dictionaries(st.text(max_size=5), st.integers(1, 9), max_size=2),
    answers_at=st.none() | st.text(max_size=9),
    hides_states=st.booleans(),
)
messages = st.one_of(
    st.builds(Hello, u64, numbers, times, abouts),
    st.builds(Events, u64, numbers, times, st.binary(max_size=99)),
    st.builds(
        lambda life, next_, place, packed: Resident(life, next_, *place, packed),
        u64, numbers, parts, st.binary(max_size=99),
    ),
    st.builds(End, u64, numbers),
    st.builds(Ask, u64, numbers),
)  # fmt: skip


@given(messages)
def test_what_goes_in_comes_out(message):
    payload = encode(message)
    assert is_ours(payload)
    assert decode(payload) == message


@given(messages, st.integers(MINOR, 99), st.lists(st.integers(0, 9), max_size=3))
def test_a_newer_minor_version_is_read(message, minor, more):
    items = msgspec.msgpack.decode(encode(message))
    items[2] = minor
    if isinstance(message, Hello):
        items[-1]["colour"] = "blue"
    assert decode(pack([*items, *more])) == message


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(payload):
    with pytest.raises(DecodeError):
        decode(payload)


HEAD = ["kvplug", MAJOR, MINOR]
EVENTS = [*HEAD, "events", 1, 2, 3.0, b""]


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (["kvplug", MAJOR + 1, 0, "events", 1, 2, 3.0, b""], "unsupported_version"),
        (["kvplug", 0, 9, "whatever"], "unsupported_version"),
        ([*HEAD, "song", 1, 2], "unknown_kind"),
        (["others", *EVENTS[1:]], "undecodable"),
        (EVENTS[:-1], "undecodable"),
        ([*HEAD, "events", -1, 2, 3.0, b""], "undecodable"),
        ([*HEAD, "events", 1, -2, 3.0, b""], "undecodable"),
        ([*HEAD, "events", 1, 2**63, 3.0, b""], "undecodable"),
        ([*HEAD, "hello", 1, 2**63, 3.0, {}], "undecodable"),
        ([*HEAD, "events", 1, 2, 3.0, "text"], "undecodable"),
        ([*HEAD, "resident", 1, 2, 3, 3, b""], "undecodable"),
        ([*HEAD, "resident", 1, 2, 0, MAX_PARTS + 1, b""], "undecodable"),
        ([*HEAD, "resident", 1, 2, -1, 3, b""], "undecodable"),
        ([*HEAD, "hello", 1, 2, 3.0, {"block_size": "many"}], "undecodable"),
        ([*HEAD, "ask", 1, None], "undecodable"),
        ([*HEAD, "events", 1, 2, 3.0, bytes(MAX_MESSAGE_BYTES)], "too_long"),
    ],
)
def test_what_is_no_message_is_refused_by_name(items, reason):
    with pytest.raises(ProtocolError) as refused:
        decode(pack(items))
    assert refused.value.reason == reason


def test_a_version_that_is_not_read_is_named():
    with pytest.raises(ProtocolError, match=r"version 7\.3 .* expected 1\.x"):
        decode(pack(["kvplug", 7, 3]))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01"])
def test_deep_nesting_is_refused(opening):
    nested = b"\x94\xa6kvplug\x01\x00" + opening * 100_000
    with pytest.raises(ProtocolError) as refused:
        decode(nested)
    assert refused.value.reason == "undecodable"


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_length_without_its_bytes_is_refused(length):
    with pytest.raises(ProtocolError):
        decode(b"\x98\xa6kvplug\x01\x00\xa6events\x01\x02" + length)


def test_a_stock_batch_is_not_ours():
    assert not is_ours(pack([1.5, [], 0]))
    assert not is_ours(pack({"ts": 1.5, "events": []}))


def of_page(row, column):
    """The hex numbers of a row of the table of hashes."""
    [cells] = re.findall(rf"^\| {row} \|(.*)\|$", PAGE, re.MULTILINE)
    return [int(number, 16) for number in cells.split("|")[column].split(",")]


@pytest.mark.parametrize(
    ("column", "namespace"), [(0, Namespace()), (1, Namespace("sql-lora", "tenant-1"))]
)
def test_hashes_are_those_of_the_page(column, namespace):
    seed, tokens = seed_of(namespace), range(48)
    assert [seed] == of_page("seed", column)
    hasher = BlockHasher(16)
    assert hasher.block_hashes(tokens, seed).tolist() == of_page("block hashes", column)
    of_sequence = of_page("sequence hashes", column)
    assert hasher.sequence_hashes(tokens, seed).tolist() == of_sequence
    assert BlockHashes(16).sequence_hashes(tokens, seed) == of_sequence


def little_endian(numbers, num_bytes):
    return b"".join(number.to_bytes(num_bytes, "little") for number in numbers)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=9), st.lists(u64, max_size=3), u64)
def test_hashes_are_as_the_page_says(tokens, keys, seed):
    def digest(data, with_seed):
        return xxhash.xxh3_64_intdigest(data, with_seed)

    first = digest(little_endian(tokens[:5], 4) + little_endian(sorted(keys), 8), seed)
    second = digest(little_endian(tokens[4:], 4), seed)
    expected = [first, digest(little_endian([first, second], 8), 1337)]
    for hasher in (BlockHasher(4, bigrams=True), BlockHashes(4, bigrams=True)):
        assert list(hasher.sequence_hashes(tokens, seed, extra_keys=[keys])) == expected


def test_the_example_of_the_page_is_read():
    said = dict(re.findall(r"^(ENGINE_HASHES|HASHES) +([0-9a-f ]+)$", PAGE, re.MULTILINE))
    [events] = re.findall(r"^\[2, .*\]$", PAGE, re.MULTILINE)
    for name, words in sorted(said.items()):  # the longer name first
        events = events.replace(name, repr(bytes.fromhex(words)))
    payload = pack(ast.literal_eval(events))
    [stored] = packed.decode(payload)
    assert stored.engine_hashes.tolist() == [1, 2]
    assert stored.hashes.tolist() == BlockHasher(16).sequence_hashes(range(32)).tolist()
    lines = re.findall(r'^(\["kvplug", 1, .*\])$', PAGE, re.MULTILINE)
    read = [decode(pack(ast.literal_eval(line.replace("PACKED", repr(payload))))) for line in lines]
    assert [type(each) for each in read] == [Hello, Events, Ask, Hello, Resident, End]


def test_what_about_leaves_out_is_as_the_page_says():
    about = decode(pack([*HEAD, "hello", 1, 0, 3.0, {}])).about
    assert (about.hash_scheme, about.dp_rank, about.dp_size) == ("xxh3-64", 0, 1)
    assert not about.bigrams
    assert not about.hides_states
    assert about.block_size is None
