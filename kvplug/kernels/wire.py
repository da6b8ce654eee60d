"""Event messages in the common dialect: msgpack bytes to flat arrays.

In:  payloads, one after the other in one uint8 array.   Out: records: one row per event.

Read are batches [ts, [events], rank?] whose events are BlockStored, BlockRemoved and
AllBlocksCleared as vLLM (arrays up to 0.23, maps since) and SGLang send them for plain prompts of
full-attention models: integer hashes, no LoRA, no salt, no extra keys. The first payload with
anything else ends the run and is left to kvplug/codec.py, which reads all dialects. What both read,
they read equally (tests/test_records.py).

A record is RECORD_WIDTH numbers: [KIND, TIER (-1: not named), FIRST_ENGINE_HASH, NUM_ENGINE_HASHES,
FIRST_TOKEN, NUM_TOKENS, BLOCK_SIZE, HAS_PARENT, NAMED]. NAMED is the sum of GROUP and KEYS, if the
event names its group, and a list of (empty) extra keys. The parent, a u64, is in another array.

Positions are as in kernels/msgpack.py. Reference: the codec.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import i8, inlined, kernel, reads, u1, u8, writes
from kvplug.kernels.bundle import i64_of, u32_of, u64_of
from kvplug.kernels.msgpack import (
    FAILED,
    after_nil,
    after_nils,
    after_scalar,
    array_header,
    integer,
    map_header,
    packed,
    read_engine_hashes,
    read_small,
    read_tokens,
    word,
)

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

RECORD_WIDTH = 9
(
    KIND, TIER, FIRST_ENGINE_HASH, NUM_ENGINE_HASHES, FIRST_TOKEN, NUM_TOKENS, BLOCK_SIZE,
    HAS_PARENT, NAMED,
) = range(RECORD_WIDTH)  # fmt: skip
STORED, REMOVED, CLEARED = 0, 1, 2
GROUP, KEYS = 1, 2
# What read_payloads leaves in its out_counts.
NUM_EVENTS, COUNT_ENGINE_HASHES, COUNT_TOKENS, DP_RANK = 0, 1, 2, 3
NUM_COUNTS = 4
# The arrays of a bundle (kernels/bundle.py).
RECORDS, PARENTS, ENGINE_HASHES, TOKENS = range(4)

# Every field of kvplug/wire.py, and its number below, in the same order. Up to WINDOW it is that of
# vLLM's arrays. A field that is named here and read nowhere below leaves an event in which it is
# not nil to the codec: enough for a field that few events have. One that most have needs a column
# in the record.
_FIELDS = (
    b"block_hashes", b"parent_block_hash", b"token_ids", b"block_size", b"lora_id", b"medium",
    b"lora_name", b"extra_keys", b"group_idx", b"kv_cache_spec_kind",
    b"kv_cache_spec_sliding_window", b"type", b"cache_salt", b"block_mm_infos", b"cxl_metadata",
    b"moe", b"bigrams",
)  # fmt: skip
(
    _HASHES, _PARENT, _TOKENS, _SIZE, _LORA_ID, _MEDIUM, _LORA_NAME, _EXTRA, _GROUP, _SPEC_KIND,
    _WINDOW, _TYPE, _SALT, _MM_INFOS, _CXL, _MOE, _BIGRAMS,
) = range(len(_FIELDS))  # fmt: skip
_UNKNOWN = len(_FIELDS)
_NUM_ARRAY_FIELDS = _WINDOW + 1
_OF_REMOVED = np.array([_HASHES, _MEDIUM, _GROUP], dtype=np.int64)
_FIXARRAY, _DOUBLE, _EVENTS_AT = 0x90, 0xCB, 10  # behind the head of the batch and its time
_TYPES = (b"BlockStored", b"BlockRemoved", b"AllBlocksCleared", b"AllCacheCleared")
_KIND_OF_TYPE = np.array([STORED, REMOVED, CLEARED, CLEARED], dtype=np.int64)
_MEDIA = (b"GPU", b"CPU", b"CPU_PINNED", b"CPU_TIER1", b"DISK", b"STORAGE", b"EXTERNAL")
_TIER_OF_MEDIUM = np.array([0, 1, 1, 1, 2, 2, 2], dtype=np.int64)
_FULL = (b"full_attention",)
_FIELD_WORDS, _TYPE_WORDS, _MEDIUM_WORDS, _FULL_WORDS = (
    packed(words) for words in (_FIELDS, _TYPES, _MEDIA, _FULL)
)


class Events(NamedTuple):
    """Events one after the other: their records, and what the records count into."""

    records: I64
    parents: U64
    engine_hashes: U64
    tokens: U32


class _Event(NamedTuple):
    """Where one event goes: its record, its parent (of length 1), and where its parts are added."""

    record: I64
    parent: U64
    engine_hashes: U64
    tokens: U32


@inlined
def events_of(bundle: U64) -> Events:
    """The arrays of a bundle of RECORDS, PARENTS, ENGINE_HASHES and TOKENS."""
    return Events(
        i64_of(bundle, RECORDS), u64_of(bundle, PARENTS), u64_of(bundle, ENGINE_HASHES),
        u32_of(bundle, TOKENS),
    )  # fmt: skip


@inlined
def _read_tier(data: Bytes, at: Index) -> tuple[Index, Index]:
    """(tier, position behind it); nil is tier -1, and what is not known ends with position -1."""
    if data[at] == 0xC0:
        return FAILED, at + 1
    medium, at = word(data, at, _MEDIUM_WORDS, 0)
    if medium < 0 or medium == len(_TIER_OF_MEDIUM):
        return FAILED, FAILED
    return _TIER_OF_MEDIUM[medium], at


@inlined
def _read_full_attention(data: Bytes, at: Index) -> Index:
    if data[at] == 0xC0:
        return at + 1
    kind, at = word(data, at, _FULL_WORDS, 0)
    return at if kind == 0 else FAILED


@inlined
def _read_group(data: Bytes, at: Index) -> Index:
    """Behind nil or 0, the only group of a model that has one kind of attention."""
    return at + 1 if data[at] == 0xC0 or data[at] == 0 else FAILED


@inlined
def _read_setting(data: Bytes, at: Index, end: Index, field: Index, record: I64) -> Index:
    """Read a field of few bytes; returns the position behind it, or -1."""
    if field == _SIZE:
        record[BLOCK_SIZE], at = read_small(data, at)
    elif field == _MEDIUM:
        record[TIER], at = _read_tier(data, at)
    elif field == _EXTRA:
        record[NAMED] += KEYS if data[at] != 0xC0 else 0
        at = after_nils(data, at, end)
    elif field == _GROUP:
        record[NAMED] += GROUP if data[at] != 0xC0 else 0
        at = _read_group(data, at)
    elif field == _SPEC_KIND:
        at = _read_full_attention(data, at)
    elif field == _UNKNOWN:
        at = after_scalar(data, at, end)
    else:  # every other field must be nil, or the codec reads the event
        at = after_nil(data, at)
    return at


@inlined
def _read_field(data: Bytes, at: Index, end: Index, field: Index, event: _Event) -> Index:
    """Read one field of an event; returns the position behind it, or -1."""
    record = event.record
    if field == _HASHES:
        record[NUM_ENGINE_HASHES], at = read_engine_hashes(
            data, at, end, event.engine_hashes, record[FIRST_ENGINE_HASH]
        )
    elif field == _TOKENS:
        record[NUM_TOKENS], at = read_tokens(data, at, end, event.tokens, record[FIRST_TOKEN])
    elif field == _PARENT and data[at] != 0xC0:
        record[HAS_PARENT] = 1
        event.parent[0], at = integer(data, at)
    else:
        at = _read_setting(data, at, end, field, record)
    return at


@inlined
def _field_of_array(kind: Index, i: Index) -> Index:
    """The field that is item i of an array event, behind its type."""
    if kind == STORED and i < _NUM_ARRAY_FIELDS:
        return np.int64(i)
    if kind == REMOVED and i < len(_OF_REMOVED):
        return np.int64(_OF_REMOVED[i])
    return np.int64(_MEDIUM if kind == CLEARED and i == 0 else _UNKNOWN)


@inlined
def _event_map(data: Bytes, at: Index, end: Index, event: _Event) -> Index:
    record = event.record
    num_fields, at = map_header(data, at)
    seen = np.int64(0)
    guess: Index = np.int64(_TYPE)
    for _ in range(num_fields):
        field, at = word(data, at, _FIELD_WORDS, guess)
        if field < 0 or at > end:
            return FAILED
        if field < _UNKNOWN and seen & (np.int64(1) << field) != 0:
            return FAILED
        seen |= np.int64(1) << field
        guess = np.int64(0) if field == _TYPE else field + 1
        if field == _TYPE:
            kind, at = word(data, at, _TYPE_WORDS, 0)
            record[KIND] = _KIND_OF_TYPE[kind] if 0 <= kind < len(_KIND_OF_TYPE) else FAILED
        else:
            at = _read_field(data, at, end, field, event)
        if at < 0 or at > end or record[KIND] < FAILED:
            return FAILED
    return at if num_fields >= 0 and seen & (np.int64(1) << np.int64(_TYPE)) != 0 else FAILED


@inlined
def _event_array(data: Bytes, at: Index, end: Index, event: _Event) -> Index:
    num_items, at = array_header(data, at)
    if num_items < 1:
        return FAILED
    kind, at = word(data, at, _TYPE_WORDS, 0)
    if kind < 0 or kind == len(_KIND_OF_TYPE):
        return FAILED
    event.record[KIND] = _KIND_OF_TYPE[kind]
    for i in range(num_items - 1):
        field = _field_of_array(event.record[KIND], i)
        at = _read_field(data, at, end, field, event)
        if at < 0 or at > end:
            return FAILED
    return at


@inlined
def _is_whole(record: I64) -> bool:
    """Whether an event has what it needs, and only that; as Stored.event() in kvplug/wire.py."""
    if record[KIND] == STORED:
        num_tokens, size = record[NUM_TOKENS], record[BLOCK_SIZE]
        aligned = num_tokens == record[NUM_ENGINE_HASHES] * size
        # What an offloading connector says may be of more than one block, or lack its salt.
        is_odd = record[NUM_ENGINE_HASHES] > 1 or record[HAS_PARENT] == 0
        is_odd = is_odd and record[TIER] > 0 and record[NAMED] == GROUP
        return bool(
            record[NUM_ENGINE_HASHES] > 0 and num_tokens > 0 and 1 <= size <= 65536 and aligned
            and not is_odd
        )  # fmt: skip
    if record[KIND] == REMOVED:
        return bool(record[NUM_ENGINE_HASHES] > 0 and record[NUM_TOKENS] == 0)
    return bool(
        record[KIND] == CLEARED and record[NUM_ENGINE_HASHES] == 0 and record[NUM_TOKENS] == 0
    )


@inlined
def _read_event(data: Bytes, at: Index, end: Index, counts: I64, events: Events) -> Index:
    number = counts[NUM_EVENTS]
    record = events.records[RECORD_WIDTH * number : RECORD_WIDTH * (number + 1)]
    event = _Event(record, events.parents[number : number + 1], events.engine_hashes, events.tokens)
    record[:] = 0
    record[KIND] = record[TIER] = FAILED
    record[FIRST_ENGINE_HASH] = counts[COUNT_ENGINE_HASHES]
    record[FIRST_TOKEN] = counts[COUNT_TOKENS]
    if 0x80 <= data[at] <= 0x8F or data[at] == 0xDE:
        at = _event_map(data, at, end, event)
    else:
        at = _event_array(data, at, end, event)
    if at < 0 or not _is_whole(record):
        return FAILED
    counts[NUM_EVENTS] += 1
    counts[COUNT_ENGINE_HASHES] += record[NUM_ENGINE_HASHES]
    counts[COUNT_TOKENS] += record[NUM_TOKENS]
    return at


@inlined
def _read_rank(data: Bytes, at: Index) -> tuple[Index, Index]:
    if data[at] == 0xC0:
        return FAILED, at + 1
    return read_small(data, at)


@inlined
def _read_payload(
    data: Bytes, at: Index, end: Index, counts: I64, events: Events
) -> tuple[bool, Index]:
    """(whether the payload was read, its data-parallel rank or -1)."""
    num_items = np.int64(data[at]) - _FIXARRAY
    # Every engine writes its time as a double; another number is left to the codec.
    if num_items < 2 or num_items > 3 or data[at + 1] != _DOUBLE or at + _EVENTS_AT >= end:
        return False, FAILED
    num_events, at = array_header(data, at + _EVENTS_AT)
    if num_events < 0 or at + num_events > end:
        return False, FAILED
    for _ in range(num_events):
        at = _read_event(data, at, end, counts, events)
        if at < 0 or at > end:
            return False, FAILED
    rank: Index = FAILED
    if num_items == 3:
        rank, at = _read_rank(data, at)
    return bool(at == end), rank


@kernel(i8(reads(u1), reads(i8), reads(u8), writes(i8)), releases_gil=True, allocates=True)
def read_payloads(data: Bytes, ends: I64, bundle: U64, out_counts: I64) -> Index:
    """Read payloads in order; returns the number of the first that was not read.

    Payload i is data[ends[i - 1] : ends[i]]; behind the last are PADDING zeros. The run also ends
    where the data-parallel rank changes. The arrays of the bundle are filled: each has room for as
    many items as data has bytes. out_counts: NUM_EVENTS, COUNT_ENGINE_HASHES, COUNT_TOKENS, and the
    DP_RANK of all (-1: none).
    """
    events = events_of(bundle)
    out_counts[:] = 0
    before = np.zeros(NUM_COUNTS, dtype=np.int64)
    for i in range(len(ends)):
        start = np.int64(0) if i == 0 else ends[i - 1]
        before[:] = out_counts
        is_read = False
        rank: Index = FAILED
        if start < ends[i]:
            is_read, rank = _read_payload(data, start, ends[i], out_counts, events)
        if not is_read or (i > 0 and rank != before[DP_RANK]):
            out_counts[:] = before
            return i
        out_counts[DP_RANK] = rank
    return len(ends)
