"""What a vLLM KV connector can say beyond vLLM's own events: CXL states, and experts of blocks.

In:  objects of these classes among what a connector's `take_events` returns.
Out: events that either wire has a form for.

    from kvplug.engines.connector_events import BlockLabels, CxlStateTransition

    def take_events(self):
        return [CxlStateTransition([71, 72], "cxl_pooled", pool_id=3)]

Block hashes are those of vLLM's events (`maybe_convert_block_hash` of vLLM makes them). vLLM puts
the objects behind its own events of the step, in a list that holds anything. They have a hash,
because KVEventAggregator counts events of tensor-parallel workers by it, and can be pickled. The
publisher `kvplug` understands them; vLLM's `zmq` would send them as they are, and vLLM's decoder
refuses a batch with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvplug.events import CxlState, MoeLabel

ConnectorHash = int | bytes
"""A block, as vLLM's events name it: bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""


class CxlStateTransition(Struct, frozen=True, tag=True):
    """Blocks moved between the GPU and a CXL pool; an omitted pool or worker list is inherited.

    As kvplug.events.CxlStateTransition, except that sequences become tuples and names become
    states; ValueError for a state that is none. Say `cxl_pooled` before the GPU's copies go: a
    block of which no copy is known has no name that a router could look up.
    """

    block_hashes: Sequence[ConnectorHash]
    new_state: CxlState | str
    pool_id: int | None = None
    accessible_workers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _set(self, "block_hashes", tuple(self.block_hashes))
        _set(self, "new_state", CxlState(self.new_state))
        if self.accessible_workers is not None:
            _set(self, "accessible_workers", tuple(self.accessible_workers))


class BlockLabels(Struct, frozen=True, tag=True):
    """Of these blocks those that vLLM stores in the same step belong to this expert."""

    block_hashes: Sequence[ConnectorHash]
    moe: MoeLabel

    def __post_init__(self) -> None:
        _set(self, "block_hashes", tuple(self.block_hashes))


_set: Final = msgspec.structs.force_setattr


def with_labels(events: Sequence[Any]) -> Sequence[Any]:
    """The events, as they are encoded, without BlockLabels; what these say is in the stored events
    instead.
    """
    labels: dict[ConnectorHash, MoeLabel] = {}
    for event in events:
        if _kind(event) == "BlockLabels":
            moe = msgspec.convert(event["moe"], MoeLabel)
            labels.update(dict.fromkeys(event["block_hashes"], moe))
    return [each for event in events for each in _labelled(event, labels)] if labels else events


def _kind(event: Any) -> object:  # noqa: ANN401
    return event.get("type") if isinstance(event, dict) else None


def _labelled(event: Any, labels: Mapping[ConnectorHash, MoeLabel]) -> Iterable[Any]:  # noqa: ANN401
    if _kind(event) == "BlockLabels":
        return ()
    if _kind(event) != "BlockStored" or labels.keys().isdisjoint(event["block_hashes"]):
        return (event,)
    return _runs(event, labels)


def _runs(
    event: dict[str, Any], labels: Mapping[ConnectorHash, MoeLabel]
) -> Iterator[dict[str, Any]]:
    """A stored event of vLLM's, divided where the label changes."""
    names, size, keys = event["block_hashes"], event["block_size"], event.get("extra_keys")
    if len(event["token_ids"]) != len(names) * size:  # a window has passed some of the blocks
        yield event
        return
    first = 0
    for moe, run in groupby(names, labels.get):
        end = first + len(list(run))
        yield event | {
            "block_hashes": names[first:end],
            "parent_block_hash": names[first - 1] if first else event["parent_block_hash"],
            "token_ids": event["token_ids"][first * size : end * size],
            "extra_keys": keys and keys[first:end],
            "moe": moe,
        }
        first = end
