"""Whether kvplug's recorder may stand in for SGLang's own.

In:  the tree of a scheduler that has just started.
Out: None, or why SGLang's own recorder has to stay.

Two small trees of the same kind do the same things, one with each recorder; what comes of both must
be equal to the byte. It takes some hundredths of a second, once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from kvplug.engines.sglang_notes import LORA_ID_CHARACTERS, Expander
from kvplug.engines.sglang_recorder import recorder_for

KNOWN_VERSIONS: Final = frozenset({"0.5.23"})
"""Of SGLang; tests/engines/test_sglang_recorder.py compares the recorders there."""

_STOCK: Final = {
    "RadixCache": "KVCacheEventRecorder",
    "PureSWARadixCache": "KVCacheEventRecorder",
    "UnifiedTreeCore": "KVCacheEventRecorder",
    "RustUnifiedTreeCore": "_RustKVCacheEventRecorder",
}
# With it some calls of a tree wait for the same call in all ranks.
_RANK_CHECKER: Final = "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"
_PAGE_SIZE: Final = 2
_ADAPTER: Final = "f" * LORA_ID_CHARACTERS
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


def objection(owner: Any) -> str | None:  # noqa: ANN401
    """Why not, in a few words for the log; `owner` is what has the recorder. Never raises."""
    try:
        import sglang

        if sglang.__version__ not in KNOWN_VERSIONS:
            return f"SGLang {sglang.__version__} is not known"
        if os.environ.get(_RANK_CHECKER):
            return f"{_RANK_CHECKER} is set"
        kinds = type(owner).__name__, type(owner.kv_events).__name__
        if _STOCK.get(kinds[0]) != kinds[1]:
            return f"a {kinds[1]} of a {kinds[0]} is not known"
        return _difference(owner)
    except Exception as error:  # noqa: BLE001  # SGLang's insides may have changed in any way
        return f"it cannot be tried: {type(error).__name__}: {error}"


def _difference(owner: Any) -> str | None:  # noqa: ANN401
    for is_dynamo in (False, True):
        expander = Expander(
            {"page_size": _PAGE_SIZE, "dynamo_format": is_dynamo, "names_extra_keys": False}
        )
        with _counters_kept():
            stock = _said_by(_scratch(owner, is_dynamo), has_ours=False)
            ours = _said_by(_scratch(owner, is_dynamo), has_ours=True)
        for theirs, notes in zip(stock, ours, strict=True):
            if _encode(expander.expand(_decode(notes))) != theirs:
                return "it says something else than SGLang's own"
    return None


@contextmanager
def _counters_kept() -> Iterator[None]:
    """Ranks compare the numbers of their nodes, and not every rank comes here."""
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    before = TreeNode.counter, UnifiedTreeNode.counter
    try:
        yield
    finally:
        TreeNode.counter, UnifiedTreeNode.counter = before


class _Slots:
    """What a tree without pools asks of an allocator."""

    device = "cpu"
    page_size = _PAGE_SIZE

    def free(self, indices: object) -> None:
        pass

    def free_segment(self, indices: object, *, start_pos: int = 0) -> None:
        pass


def _scratch(owner: Any, is_dynamo: bool) -> Any:  # noqa: ANN401
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    is_unified = "Unified" in type(owner).__name__
    backend = "rust" if "Rust" in type(owner).__name__ else "python"
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=_Slots(),
        page_size=_PAGE_SIZE,
        is_eagle=owner.is_eagle,
        enable_kv_cache_events=True,
        dynamo_kv_event_format=is_dynamo,
        tree_components=(ComponentType.FULL,) if is_unified else None,
        tree_core_backend=backend if is_unified else None,
    )
    cache = (UnifiedRadixCache if is_unified else RadixCache)(params)
    params.kv_event_lora_names.register(lora_id=_ADAPTER, lora_name="adapter")
    params.kv_event_lora_names.register(_Request())
    return cache


class _Request:
    """One of the adapter, to SGLang's table of names."""

    lora_id = _ADAPTER
    extra_key = _ADAPTER


_NAMESPACES: Final[tuple[dict[str, str | None], ...]] = (
    {},
    {"cache_salt": "salt"},
    {"extra_key": "key"},
    {"extra_key": "key", "cache_salt": "salt"},
    {"extra_key": _ADAPTER},
)


def _said_by(cache: Any, *, has_ours: bool) -> list[bytes]:  # noqa: ANN401
    """Of each step, its events in msgpack."""
    errors: list[Exception] = []
    if has_ours:
        recorder_for(getattr(cache, "tree_core", cache), errors.append)
    said = [_encode(cache.take_events()) for _ in _steps(cache)]
    if errors:
        raise errors[0]
    return said


def _steps(cache: Any) -> Iterator[None]:  # noqa: ANN401
    """A prefix that two requests share, a token beyond 32 bits, what leaves, and a reset."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    for namespace in _NAMESPACES:
        _insert(cache, [1, 2, 3, 4, 5, 6, 7], namespace)
        yield
        _insert(cache, [1, 2, 3, 4, 2**40, 8, 9, 9, 9], namespace)
        yield
    cache.evict(EvictParams(num_tokens=10))
    yield
    _insert(cache, [1, 2, 3, 4, 5, 6, 7], {})
    cache.evict(EvictParams(num_tokens=1000))
    yield
    cache.reset()
    _insert(cache, [1, 2, 3], {})
    yield


def _insert(cache: Any, tokens: list[int], namespace: dict[str, str | None]) -> None:  # noqa: ANN401
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", tokens), **namespace)
    cache.insert(InsertParams(key=key, value=torch.arange(len(tokens))))
