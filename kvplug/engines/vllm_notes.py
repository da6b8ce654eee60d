"""The notes of vLLM's recorder, as the events that vLLM would have written.

In:  what kvplug/engines/vllm_recorder.py noted, and the context that it gave once.
Out: vLLM's events as its encoder writes them: maps, fields in order, omitted defaults left out.

A note is an array or bytes, and an event of vLLM's or of a connector's is a map, which passes as it
is. Notes are:

    bytes                     a removed block: its hash, then its group in four bytes, big-endian
    (group, block_size, parent or None, hashes, token_ids, start, end)
                              stored blocks: their hashes, as bytes, and token_ids[start:end],
                              which are numbers, or bytes of them
    (..., lora_id, lora_name, extra_keys, session_id)
                              the same of a request that has any of these

No vLLM is needed here: the sender process expands.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from kvplug.engines.vllm_prompts import TOKEN_TYPE

GROUP_BYTES: Final = 4
_INT_BYTES: Final = 8  # vLLM keeps the last 64 bits of a hash where its events have integers

Event = dict[str, Any]


class Expander:
    """Call `expand` with what each batch contains, in order."""

    def __init__(self, context: dict[str, Any]) -> None:
        """`context`: what `vllm_recorder.context_of` found. KeyError for any other."""
        self._medium: str = context["medium"]
        self._has_int_hashes: bool = context["int_hashes"]
        self._groups = [_group_fields(kind, window) for kind, window in context["groups"]]

    def expand(self, items: Sequence[Any]) -> list[Any]:
        """Events for notes; what is no note stays. ValueError for a note of another form."""
        return [
            self._removed(item)
            if isinstance(item, bytes)
            else item
            if isinstance(item, dict)
            else self._stored(item)
            for item in items
        ]

    def forget(self) -> None:
        """Batches were lost: a note says all that it means, so there is nothing to forget."""

    def _removed(self, key: bytes) -> Event:
        return {
            "type": "BlockRemoved",
            "block_hashes": [self._external(key[:-GROUP_BYTES])],
            "medium": self._medium,
            "group_idx": int.from_bytes(key[-GROUP_BYTES:], "big"),
        }

    def _stored(self, note: Sequence[Any]) -> Event:
        group, block_size, parent, hashes, token_ids, start, end, *details = note
        lora_id, lora_name, extra_keys, session_id = details or (None, None, None, None)
        event = {
            "type": "BlockStored",
            "block_hashes": [self._external(each) for each in hashes],
            "parent_block_hash": None if parent is None else self._external(parent),
            "token_ids": _as_list(token_ids)[start:end],
            "block_size": block_size,
            "lora_id": lora_id,
            "medium": self._medium,
            "lora_name": lora_name,
        }
        if hashes:
            event["extra_keys"] = extra_keys or [None] * len(hashes)
        event["group_idx"] = group
        if group < len(self._groups):
            event |= self._groups[group]
        if session_id is not None:
            event["session_id"] = session_id
        return event

    def _external(self, block_hash: bytes) -> int | bytes:
        if self._has_int_hashes:
            return int.from_bytes(block_hash[-_INT_BYTES:], "big")
        return block_hash


def _as_list(token_ids: list[int] | bytes) -> list[int]:
    """From kvplug/engines/vllm_prompts.py they come as bytes."""
    return array(TOKEN_TYPE, token_ids).tolist() if isinstance(token_ids, bytes) else token_ids


def _group_fields(kind: str, sliding_window: int | None) -> Event:
    if sliding_window is None:
        return {"kv_cache_spec_kind": kind}
    return {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": sliding_window}
