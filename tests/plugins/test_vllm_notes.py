"""Notes of vLLM's recorder, as the events that vLLM writes: fields in order, defaults left out.

tests/engines/test_vllm_recorder.py compares them with vLLM's own.
"""

from types import SimpleNamespace

import msgspec
import pytest

from kvplug import codec
from kvplug.engines.vllm_notes import Expander
from kvplug.engines.vllm_prompts import PromptPacker, packed_tokens

CONTEXT = {
    "recorder": "vllm",
    "medium": "GPU",
    "int_hashes": True,
    "groups": [["full_attention", None], ["sliding_window", 64]],
}
FIRST, SECOND = bytes(24) + (71).to_bytes(8, "big"), bytes(24) + (2**64 - 1).to_bytes(8, "big")


def expand(*items, **changes):
    noted = msgspec.msgpack.decode(msgspec.msgpack.encode(items))
    return Expander(CONTEXT | changes).expand(noted)


def test_stored_blocks_of_a_plain_request():
    [event] = expand((0, 2, None, [FIRST, SECOND], [5, 6, 7, 8, 9], 0, 4))
    assert list(event.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [71, 2**64 - 1]),
        ("parent_block_hash", None),
        ("token_ids", [5, 6, 7, 8]),
        ("block_size", 2),
        ("lora_id", None),
        ("medium", "GPU"),
        ("lora_name", None),
        ("extra_keys", [None, None]),
        ("group_idx", 0),
        ("kv_cache_spec_kind", "full_attention"),
    ]


def test_tokens_of_a_packed_prompt():
    request = SimpleNamespace(_all_token_ids=[2**32 - 1, 6, 7, 8, 9], block_hashes=[])
    core = SimpleNamespace(request_block_hasher=lambda request: [FIRST, SECOND])
    own = core.request_block_hasher
    packer = PromptPacker(core)
    assert core.request_block_hasher(request) == [FIRST, SECOND]
    assert request._block_hasher is own  # for the tokens of its answer
    [event] = expand((0, 2, None, [FIRST], packed_tokens(request, 0, 2), 0, 2))
    assert event["token_ids"] == [2**32 - 1, 6]
    assert packed_tokens(request, 4, 6) is None
    packer.detach()
    assert core.request_block_hasher is own


@pytest.mark.parametrize("token_ids", [[2**32, 1], [-1, 1], ["a"], None])
def test_a_prompt_that_cannot_be_packed_is_not(token_ids):
    request = SimpleNamespace(_all_token_ids=token_ids)
    core = SimpleNamespace(request_block_hasher=lambda request: [FIRST])
    PromptPacker(core)
    assert core.request_block_hasher(request) == [FIRST]
    assert packed_tokens(request, 0, 1) is None


def test_a_request_with_an_adapter_a_salt_and_a_session():
    keys = [["adapter", "salt"], ["adapter"]]
    note = (1, 1, FIRST, [SECOND, FIRST], [5, 6, 7], 1, 3, 4, "adapter", keys, "session")
    [event] = expand(note)
    assert (event["parent_block_hash"], event["token_ids"]) == (71, [6, 7])
    assert (event["lora_id"], event["lora_name"]) == (4, "adapter")
    assert list(event.items())[-5:] == [
        ("extra_keys", keys),
        ("group_idx", 1),
        ("kv_cache_spec_kind", "sliding_window"),
        ("kv_cache_spec_sliding_window", 64),
        ("session_id", "session"),
    ]


def test_where_no_block_is_kept_there_are_no_keys():
    [event] = expand((1, 2, None, [], [5, 6], 0, 2))
    assert event["block_hashes"] == []
    assert "extra_keys" not in event


def test_a_group_that_the_engine_has_not_described():
    [event] = expand((2, 1, None, [FIRST], [5], 0, 1))
    assert (event["group_idx"], list(event)[-1]) == (2, "group_idx")


def test_a_removed_block():
    [event] = expand(FIRST + (1).to_bytes(4, "big"))
    assert list(event.items()) == [
        ("type", "BlockRemoved"),
        ("block_hashes", [71]),
        ("medium", "GPU"),
        ("group_idx", 1),
    ]


def test_hashes_stay_bytes_where_vllm_publishes_bytes():
    stored, removed = expand((0, 1, FIRST, [SECOND], [5], 0, 1), FIRST + bytes(4), int_hashes=False)
    assert (stored["parent_block_hash"], stored["block_hashes"]) == (FIRST, [SECOND])
    assert removed["block_hashes"] == [FIRST]


def test_events_stay_as_they_are_and_in_order():
    events = [{"type": "AllBlocksCleared"}, {"type": "BlockStored", "medium": "CXL"}]
    expanded = expand(FIRST + bytes(4), *events, SECOND + bytes(4))
    assert expanded[1:3] == events
    assert [each["type"] for each in expanded[::3]] == ["BlockRemoved"] * 2


def test_the_codec_reads_what_is_expanded():
    expanded = expand((0, 2, None, [FIRST], [5, 6], 0, 2), FIRST + bytes(4))
    batch = codec.decode(msgspec.msgpack.encode([1.0, expanded, 0]))
    stored, removed = batch.events
    assert (list(stored.block_hashes), list(stored.token_ids)) == ([71], [5, 6])
    assert list(removed.block_hashes) == [71]
    assert not batch.skipped


@pytest.mark.parametrize("note", [(), (0, 2, None), "text", 7])
def test_another_form_is_refused(note):
    with pytest.raises((ValueError, TypeError)):
        expand(note)
