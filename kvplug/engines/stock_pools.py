"""CXL states on the stock wire, which knows a block by the medium that it is stored in.

In:  events of one rank, as they are to be encoded, transitions among them.
Out: events that vLLM's own types decode: a copy in a pool is a BlockStored of medium "CXL".

A pool's copy is named by its engine hash and has no tokens, as vLLM's offloading connectors write
it. Pools and readers have no form on this wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvplug.events import CxlState, EngineHash
from kvplug.wire import Cleared, Removed, Stored, Transition

_DEVICE, _POOL = "GPU", "CXL"


class StockPools:
    """Call `on_wire` with each batch's events, in order."""

    def __init__(self, *, tells_device: bool) -> None:
        """`tells_device`: the engine says itself when a block comes to or leaves the device, as
        vLLM's block pool does; else a transition means it, and is written as such.
        """
        self._pooled: set[EngineHash] = set()
        self._on_device: Counter[EngineHash] | None = None if tells_device else Counter()

    def on_wire(self, events: Sequence[Any]) -> list[Any]:
        """The same with what vLLM's types have no form for in another."""
        return [each for event in events for each in self._translated(event)]

    def _translated(self, event: Any) -> Iterable[Any]:  # noqa: ANN401
        if isinstance(event, dict):
            return self._of_engine(event)
        if isinstance(event, Transition):
            return self._moved(event.block_hashes, event.new_state)
        if isinstance(event, Stored) and event.cxl_metadata is not None:
            self._store(event, event.cxl_metadata.state)
        elif isinstance(event, Cleared):
            self._clear(event.medium)
        elif self._on_device is not None:
            self._count(event)
        return (event,)

    def _of_engine(self, event: dict[str, Any]) -> Iterable[Any]:
        """An event as an engine wrote it."""
        if event.get("type") == "CxlStateTransition":
            return self._moved(event["block_hashes"], CxlState(event["new_state"]))
        if event.get("type") == "AllBlocksCleared":
            self._clear(None)
        return (event,)

    def _store(self, event: Stored, state: CxlState) -> None:
        if state is CxlState.CXL_POOLED:
            event.medium = _POOL
            self._pooled.update(event.block_hashes)
        else:
            self._count(event)

    def _clear(self, medium: str | None) -> None:
        if medium is None:
            self._pooled.clear()
        if self._on_device is not None and medium in (None, _DEVICE):
            self._on_device.clear()

    def _count(self, event: Any) -> None:  # noqa: ANN401
        if self._on_device is None or event.medium not in (None, _DEVICE):
            return
        if isinstance(event, Stored):
            self._on_device.update(event.block_hashes)
        else:
            self._on_device.subtract(event.block_hashes)
            self._on_device = +self._on_device

    def _moved(self, names: Iterable[Any], state: CxlState) -> Iterator[Stored | Removed]:
        names = list(dict.fromkeys(names))
        pooled = [name for name in names if name in self._pooled]
        others = [name for name in names if name not in self._pooled]
        if state is CxlState.CXL_POOLED:
            self._pooled.update(others)
            yield from _stored(others, _POOL)
            yield from self._leave_device(names)
            return
        if state is not CxlState.EVICTED:
            yield from self._enter_device(names)
        self._pooled.difference_update(pooled)
        yield from _removed(pooled, _POOL)
        if state is CxlState.EVICTED:
            yield from self._leave_device(others)

    def _enter_device(self, names: Sequence[EngineHash]) -> Iterator[Stored]:
        if self._on_device is not None:
            missing = [name for name in names if not self._on_device[name]]
            self._on_device.update(missing)
            yield from _stored(missing, _DEVICE)

    def _leave_device(self, names: Sequence[EngineHash]) -> Iterator[Removed]:
        """Each of their copies, however many there are."""
        if self._on_device is not None:
            yield from _removed(
                [name for name in names for _ in range(self._on_device.pop(name, 0))], _DEVICE
            )


def _stored(names: Sequence[EngineHash], medium: str) -> Iterator[Stored]:
    if names:
        yield Stored(block_hashes=tuple(names), token_ids=(), block_size=0, medium=medium)


def _removed(names: Sequence[EngineHash], medium: str) -> Iterator[Removed]:
    if names:
        yield Removed(tuple(names), medium)
