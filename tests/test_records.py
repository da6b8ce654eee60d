"""What the kernels read of the wire is what the codec reads, and plain streams are read."""

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import codec, wire
from kvplug.errors import DecodeError
from kvplug.events import AllBlocksCleared, BlockCopied, BlockStored
from kvplug.kernels import wire as kernels
from kvplug.records import MAX_BYTES, read_payloads

# The order of fields in events that are arrays.
ORDER = [
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
]  # fmt: skip
VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))
encode = msgspec.msgpack.encode

hashes = st.integers(-(2**63), 2**64 - 1)
tokens = st.integers(0, 2**32 - 1) | st.sampled_from([0, 127, 128, 255, 256, 65535, 65536])
media = st.sampled_from(["GPU", "CPU", "CPU_PINNED", "CPU_TIER1", "DISK", "STORAGE", None])


@st.composite
def stored(draw):
    num_blocks, block_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_tokens = num_blocks * block_size
    return {
        "block_hashes": draw(st.lists(hashes, min_size=num_blocks, max_size=num_blocks)),
        "parent_block_hash": draw(st.none() | hashes),
        "token_ids": draw(st.lists(tokens, min_size=num_tokens, max_size=num_tokens)),
        "block_size": block_size,
        "lora_id": None,
        "medium": draw(media),
        "lora_name": None,
        "extra_keys": draw(st.none() | st.just([None] * num_blocks)),
        "group_idx": draw(st.sampled_from([None, 0])),
        "kv_cache_spec_kind": draw(st.sampled_from([None, "full_attention"])),
    }


removed = st.fixed_dictionaries(
    {"block_hashes": st.lists(hashes, min_size=1, max_size=3), "medium": media},
    optional={"group_idx": st.sampled_from([None, 0])},
)
cleared = st.fixed_dictionaries({}, optional={"medium": media})


def form(tag, fields, is_map):
    if is_map:
        return {"type": tag, **fields}
    return [tag, *(fields[name] for name in ORDER if name in fields)]


def is_offloaded(fields):
    """Whether an offloading connector of vLLM may mean a chunk by it, or leave its salt out."""
    is_lower = fields["medium"] not in ("GPU", None)
    is_known = fields["parent_block_hash"] is not None and len(fields["block_hashes"]) == 1
    names_group = fields["group_idx"] is not None and fields["extra_keys"] is None
    return is_lower and names_group and not is_known


events = st.builds(
    form,
    st.just("BlockStored"), stored().filter(lambda fields: not is_offloaded(fields)), st.booleans()
) | st.builds(form, st.just("BlockRemoved"), removed, st.booleans()) | st.builds(
    form, st.sampled_from(["AllBlocksCleared", "AllCacheCleared"]), cleared, st.just(True)
)  # fmt: skip
ranks = st.sampled_from([(), (None,), (0,), (3,)])
batches = st.builds(
    lambda ts, batch, rank: [ts, batch, *rank],
    st.floats(0, 1e9),
    st.lists(events, max_size=4),
    ranks,
)


def same_as_codec(payload):
    """Whether the kernels read the payload; what they read must be what the codec reads."""
    records = read_payloads([payload])
    if records is None:
        return False
    batch = codec.decode(payload)
    read = tuple(records.event(i) for i in range(records.num_events))
    # The codec fills in what goes without saying, Records leave it out.
    assert read == tuple(map(plain, batch.events))
    assert (records.dp_rank, records.num_payloads, records.ts) == (batch.dp_rank, 1, batch.ts)
    assert not batch.skipped
    assert not batch.unknown_media
    return True


def plain(event):
    if isinstance(event, BlockStored):
        return msgspec.structs.replace(event, attention="full_attention", group=0)
    return event


@given(batches)
def test_plain_batches_are_read_as_the_codec_reads_them(batch):
    assert same_as_codec(encode(batch))


@given(stored().filter(is_offloaded), st.booleans())
def test_what_a_connector_says_is_left_to_the_codec(fields, is_map):
    payload = encode([0.0, [form("BlockStored", fields, is_map)]])
    assert read_payloads([payload]) is None
    batch = codec.decode(payload)
    if len(fields["block_hashes"]) > 1:
        assert batch.skipped == {"chunked_offload": 1}
    else:
        [event] = batch.events
        assert isinstance(event, BlockCopied)


values = st.recursive(
    st.none() | st.booleans() | hashes | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
names = st.sampled_from(
    [*wire.Stored.__struct_fields__, "type", "locality", "ownership", "session_id", "unheard_of"]
)


@given(stored() | removed, st.dictionaries(names, values, min_size=1, max_size=3),
       st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]))  # fmt: skip
def test_odd_fields_are_read_alike_or_left_to_the_codec(event, changes, tag):
    same_as_codec(encode([1.0, [{"type": tag, **event, **changes}], 0]))


WIRE_FIELDS = [
    (shape, field)
    for shape in (wire.Stored, wire.Removed, wire.Cleared)
    for field in shape.__struct_fields__
]
PLAIN = {
    wire.Stored: {"block_hashes": [1], "token_ids": [1, 2], "block_size": 2},
    wire.Removed: {"block_hashes": [1]},
    wire.Cleared: {},
}
ODD_VALUES = [
    None, True, False, 0, 1, 2**40, 1.5, "", "GPU", "x", b"y", [], [None], [1], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "field"), WIRE_FIELDS, ids=lambda it: getattr(it, "__name__", it)
)
def test_the_kernels_know_each_field_of_the_wire(shape, field):
    """A field that they skipped as unknown would be lost for plain events."""
    assert field.encode() in kernels._FIELDS
    for value in ODD_VALUES:
        tag = shape.__struct_config__.tag
        same_as_codec(encode([1.0, [{"type": tag, **PLAIN[shape], field: value}]]))


def test_an_event_of_its_own_is_left_to_the_codec():
    read = {kind.encode() for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared")}
    assert read <= {*kernels._TYPES}
    assert wire.Transition.__struct_config__.tag.encode() not in kernels._TYPES


def test_a_key_that_is_no_text_is_left_to_the_codec():
    """Which refuses the event: it may be a damaged name of a field."""
    tag = b"\x82\xa4type\xafAllCacheCleared"
    assert_alike_if_decodable(b"\x92\xcb" + bytes(8) + b"\x91" + tag + b"\xa6\x00\x80dium\xa3GPU")


@given(batches, st.data())
def test_damaged_bytes_are_read_alike_or_left_to_the_codec(batch, data):
    payload = bytearray(encode(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not payload:
            return
    assert_alike_if_decodable(bytes(payload))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_alike_or_left_to_the_codec(payload):
    assert_alike_if_decodable(payload)


def assert_alike_if_decodable(payload):
    try:
        codec.decode(payload)
    except DecodeError:
        assert read_payloads([payload]) is None
        return
    same_as_codec(payload)


def test_a_field_that_comes_twice_is_read_alike_or_left_to_the_codec():
    once = {"block_hashes": [7], "parent_block_hash": 5, "token_ids": [1], "block_size": 1}
    event = bytearray(encode({"type": "BlockStored", **once}))
    event[0] += 1  # one field more in the map
    for name, value in (("parent_block_hash", None), ("medium", "CPU"), ("block_hashes", [9])):
        twice = bytes(event) + encode(name) + encode(value)
        assert_alike_if_decodable(b"\x92\xcb" + bytes(8) + b"\x91" + twice)


def test_a_run_ends_where_the_dialect_or_the_rank_does():
    plain_batch = encode([1.0, [["BlockRemoved", [7], "GPU"]], 0])
    other_rank = encode([1.0, [["BlockRemoved", [7], "GPU"]], 1])
    with_lora = encode([1.0, [["BlockStored", [7], None, [1], 1, 5, "GPU"]], 0])
    for last in (other_rank, with_lora, b"", b"\xc1"):
        records = read_payloads([plain_batch, plain_batch, last, plain_batch])
        assert (records.num_payloads, records.num_events) == (2, 2)
    assert read_payloads([with_lora, plain_batch]) is None
    assert read_payloads([]) is None


@pytest.mark.parametrize("ts", [0, 7, 2**40, -3, None])
def test_a_time_that_is_no_double_is_left_to_the_codec(ts):
    payload = encode([ts, [["BlockRemoved", [7], "GPU"]], 0])
    assert read_payloads([payload]) is None
    assert codec.decode(payload).ts == (ts or 0)


def test_a_batch_without_events_is_read():
    assert same_as_codec(encode([1.0, [], 0]))


def test_runs_are_bounded_and_a_payload_beyond_the_bound_is_left_to_the_codec():
    batch = encode([1.0, [["BlockRemoved", list(range(2**32, 2**32 + 5000)), "GPU"]], 0])
    num_fit = MAX_BYTES // len(batch)
    assert read_payloads([batch] * (num_fit + 3)).num_payloads == num_fit
    assert read_payloads([batch * (num_fit + 1)]) is None


def test_the_scratch_of_one_thread_is_used_again():
    clear = encode([1.0, [{"type": "AllBlocksCleared"}], 0])
    first = read_payloads([encode([1.0, [["BlockRemoved", [1], "GPU"]], 2])])
    assert first.dp_rank == 2
    second = read_payloads([clear])
    assert (second.event(0), second.dp_rank) == (AllBlocksCleared(), 0)


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_what_engines_send_is_read_alike(path):
    for vector in json.loads(path.read_text())["vectors"]:
        payload = bytes.fromhex(vector["payload"])
        try:
            codec.decode(payload)
        except DecodeError:
            assert read_payloads([payload]) is None
        else:
            same_as_codec(payload)


@pytest.mark.parametrize("stem", ["vllm-0.11", "vllm-0.32", "sglang-0.5.23"])
def test_plain_prompts_of_engines_are_read(stem):
    path = Path(__file__).parent / "vectors" / f"{stem}.json"
    first = json.loads(path.read_text())["vectors"][0]
    assert same_as_codec(bytes.fromhex(first["payload"]))


def test_long_streams_come_out_whole():
    rng = random.Random(5)
    payloads, expected = [], []
    for number in range(300):
        names = [rng.getrandbits(64) for _ in range(rng.randrange(1, 9))]
        widths = [rng.choice([7, 8, 16, 17, 32]) for _ in range(4 * len(names))]
        ids = [rng.randrange(2**width) for width in widths]
        payloads.append(
            encode([1.0, [["BlockStored", names, number or None, ids, 4, None, "GPU"]]])
        )
        expected.extend(codec.decode(payloads[-1]).events)
    records = read_payloads(payloads)
    assert [records.event(i) for i in range(records.num_events)] == expected
