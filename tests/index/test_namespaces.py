"""Namespaces as vLLM and SGLang put them on the wire, chunk by chunk, against a plain reference
implementation.
"""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import codec
from kvplug.events import Namespace, Rank
from kvplug.hashing import as_tokens, seed_of
from kvplug.index.apply_result import ApplyResult
from kvplug.index.block_index import BlockIndex
from kvplug.records import read_payloads
from tests.index.reference import ReferenceIndex, engine_hash

BLOCK_SIZE, RANK = 2, Rank("a")
# A salt that is called like the adapter: vLLM sends both as bare strings.
NAMESPACES = [Namespace(lora, salt) for lora in ("", "x", "y") for salt in ("", "x", "y")]
namespaces = st.sampled_from(NAMESPACES)
prompts = st.lists(st.sampled_from([1, 2]), min_size=2, max_size=12)
dialects = st.sampled_from(["vllm", "sglang"])


def contents_of(namespace, tokens):
    """The blocks of a prompt as the reference implementation knows them."""
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [(namespace, tuple(tokens[:end])) for end in ends]


def event(dialect, contents, parent):
    """BlockStored as the engine would send it: vLLM 0.32, or SGLang 0.5.23 in Dynamo's format."""
    namespace, tokens = contents[-1]
    stored = {
        "type": "BlockStored",
        "block_hashes": [engine_hash("common", content) for content in contents],
        "parent_block_hash": engine_hash("common", parent) if parent else None,
        "token_ids": list(tokens[len(tokens) - len(contents) * BLOCK_SIZE :]),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": namespace.lora_name or None,
    }
    if dialect == "sglang":
        return {**stored, "cache_salt": namespace.salt or None}
    adapter = [namespace.lora_name] if namespace.lora_name else []
    keys = [list(adapter) for _ in contents]
    if parent is None and namespace.salt:
        keys[0].append(namespace.salt)  # the salt comes with the first block only
    return {**stored, "extra_keys": [key or None for key in keys], "group_idx": 0}


def chunks_of(contents, cuts):
    """The events of a prefill that was cut into chunks: (parent, blocks)."""
    edges = sorted({0, len(contents), *(cut for cut in cuts if cut < len(contents))})
    for start, end in itertools.pairwise(edges):
        yield (contents[start - 1] if start else None), contents[start:end]


def apply(index, stored):
    """As ingestion does: what looks plain goes as arrays, the rest through the codec."""
    payload = msgspec.msgpack.encode([0.0, [stored], 0])
    records = read_payloads([payload])
    if records is None:
        return index.apply(RANK, codec.decode(payload))
    applied = ApplyResult()
    assert index.apply_records(RANK, records, 0, 1000, applied) == 1
    return applied


@given(
    requests=st.lists(
        st.tuples(namespaces, prompts, st.sets(st.integers(1, 5))), min_size=1, max_size=6
    ),
    dialect=dialects,
    asked=st.tuples(namespaces, prompts),
)
def test_every_chunk_lands_in_the_namespace_of_its_request(requests, dialect, asked):
    index, reference = BlockIndex(BLOCK_SIZE), ReferenceIndex()
    number = index.add_rank(RANK)
    for namespace, tokens, cuts in requests:
        contents = contents_of(namespace, tokens)
        for parent, part in chunks_of(contents, cuts):
            applied = apply(index, event(dialect, part, parent))
            assert (applied.num_stored, dict(applied.rejected)) == (len(part), {})
        reference.store(RANK, 0, contents)
    index.check()
    for namespace, tokens in (asked, *(request[:2] for request in requests)):
        hashes = index.hasher.sequence_hashes(as_tokens(tokens), seed_of(namespace))
        depths, _ = reference.overlap(RANK, contents_of(namespace, tokens), [RANK])
        assert index.overlap(hashes, now_s=0.0).depth[number] == depths[3]


def test_no_two_namespaces_have_a_hash_in_common():
    index = BlockIndex(BLOCK_SIZE)
    tokens = as_tokens(range(64))
    hashes = [index.hasher.sequence_hashes(tokens, seed_of(each)) for each in NAMESPACES]
    assert len(np.unique(np.concatenate(hashes))) == len(NAMESPACES) * 32


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_chunk_whose_first_one_was_missed_is_not_put_into_any_namespace(dialect):
    index = BlockIndex(BLOCK_SIZE)
    index.add_rank(RANK)
    first, *rest = contents_of(Namespace(salt="x"), [1, 2, 1, 2])
    assert dict(apply(index, event(dialect, rest, first)).rejected) == {"unknown_parent": 1}
    assert len(index) == 0
