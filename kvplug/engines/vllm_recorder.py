"""What vLLM's block pool does, noted on the engine's thread at the least cost.

In:  a KVCacheManager of vLLM (KNOWN_VERSIONS of vllm_guard.py) with its BlockPool.
Out: notes (vllm_notes.py) where the manager's `take_events` returned events.

The pool's own events stay switched off, so that it does its bookkeeping by its cheap path, and what
would have made events is noted by attributes of these two instances. No class of vLLM is changed:
`detach` deletes the attributes. The rare ways to an event (partial blocks, reports of reused
blocks) make vLLM's own event for the call, which takes its place among the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplug.engines.vllm_prompts import packed_tokens

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.request import Request

Note = tuple[Any, ...]
ExtraKeys = tuple[Any, ...] | None
Details = tuple[int | None, str | None, list[ExtraKeys] | None, str | None]

_STOCK_WAYS: Final = ("cache_partial_block", "emit_cached_block_events")


def objection(manager: KVCacheManager) -> str:
    """Why this manager cannot be recorded; "" if it can."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    pool = manager.block_pool
    if type(manager) is not KVCacheManager or type(pool) is not BlockPool:
        return (
            f"expected vLLM's KVCacheManager and BlockPool, got {type(manager).__name__} and "
            + (type(pool).__name__)
        )
    if any(each.block_pool is not pool for each in manager.coordinator.single_type_managers):
        return "expected one pool of blocks, got several"
    if not pool.enable_kv_cache_events:
        return "the pool's events are switched off"
    return ""


def context_of(manager: KVCacheManager) -> dict[str, Any]:
    """What an Expander must know of the manager to expand its notes."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return {
        "recorder": "vllm",
        "medium": getattr(manager.block_pool, "medium", "GPU"),
        "int_hashes": isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int),
        "groups": manager.kv_cache_event_metadata,
    }


class Recorder:
    """Records from its creation until `detach`; all calls are from the engine's thread.

    `publish_now` gets notes that cannot wait for the engine's next step. `on_failure` gets the
    error that ended the recording: the notes since the last batch are lost, and vLLM makes its
    own events from then on.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        publish_now: Callable[[list[Any]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        pool = manager.block_pool
        self._manager, self._pool = manager, pool
        self._publish_now, self._on_failure = publish_now, on_failure
        self._details_of = _Details()
        self._cache, self._reset = pool.cache_full_blocks, pool.reset_prefix_cache
        self._take_stock = manager.take_events
        self._hash_block_size = pool.hash_block_size
        self._has_no_nulls = {
            each.kv_cache_group_id
            for each in manager.coordinator.single_type_managers
            if type(each) is FullAttentionManager
        }
        self._notes: list[Any] = self._take_stock()
        self._replaced: list[tuple[object, str]] = []
        try:
            self._attach(manager, pool)
        except Exception:
            self.detach()
            raise

    def _attach(self, manager: KVCacheManager, pool: BlockPool) -> None:
        self._replace(manager, "take_events", self._take_notes)
        self._replace(pool, "cache_full_blocks", self._cache_full_blocks)
        self._replace(pool, "reset_prefix_cache", self._reset_prefix_cache)
        # Keys of blocks are the notes of their removal: no function of ours runs for them.
        self._replace(pool, "_emit_block_removed_events", self._notes.extend)
        for name in _STOCK_WAYS:
            if hasattr(pool, name):
                self._replace(pool, name, self._stock_way(getattr(pool, name)))
        pool.enable_kv_cache_events = False

    def _replace(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    def detach(self) -> list[Any]:
        """Leave both instances as they were; what was noted and not taken yet."""
        for owner, name in self._replaced:
            delattr(owner, name)
        self._replaced.clear()
        self._pool.enable_kv_cache_events = True
        return self._take_notes()

    def _fail(self, error: Exception) -> None:
        self.detach()
        self._on_failure(error)

    def _take_notes(self) -> list[Any]:
        """KVCacheManager.take_events."""
        notes = self._notes.copy()
        self._notes.clear()  # and not a new list: the pool has a method of this one
        return notes

    def _cache_full_blocks(  # noqa: PLR0913  # as vLLM calls it
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """BlockPool.cache_full_blocks."""
        where = num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id
        self._cache(request, blocks, *where, block_mask)
        if num_cached_blocks >= num_full_blocks:
            return
        try:
            self._note_stored(request, blocks, where, block_mask)
        except Exception as error:  # noqa: BLE001  # nothing of ours may raise into vLLM
            self._fail(error)

    def _note_stored(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        where: tuple[int, int, int, int],
        block_mask: list[bool] | None,
    ) -> None:
        first, end, size, group = where
        hashes: BlockHashList = request.block_hashes
        if size != self._hash_block_size:
            hashes = self._resolved(hashes, size)
        parent, stored = hashes[first - 1] if first else None, hashes[first:end]
        kept = None
        if block_mask is not None or group not in self._has_no_nulls:
            kept = _kept(blocks, first, end, block_mask)
            stored = [hashes[each] for each in kept]
        note: Note = (group, size, parent, stored, *_tokens(request, first * size, end * size))
        if _has_details(request, first):
            note += self._details_of(request, range(first, end) if kept is None else kept, size)
        self._notes.append(note)

    def _resolved(self, hashes: BlockHashList, block_size: int) -> BlockHashList:
        """Of blocks that are larger than those that vLLM hashes."""
        from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

        return BlockHashListWithBlockSize(hashes, self._hash_block_size, block_size)

    def _reset_prefix_cache(self) -> bool:
        """BlockPool.reset_prefix_cache, published at once: an idle engine takes no step."""
        from vllm.distributed.kv_events import AllBlocksCleared

        is_reset: bool = self._reset()
        if is_reset:
            try:
                self._notes.append(AllBlocksCleared())
                self._publish_now(self._take_notes())
            except Exception as error:  # noqa: BLE001  # nothing of ours may raise into vLLM
                self._fail(error)
        return is_reset

    def _stock_way(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, with vLLM's events while it runs."""

        def with_events(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._pool.enable_kv_cache_events = True
            try:
                return method(*args, **kwargs)
            finally:
                self._notes += self._take_stock()
                self._pool.enable_kv_cache_events = not self._replaced

        return with_events


class _Details:
    """What few requests have: an adapter, a salt, images, embeddings, a session."""

    def __init__(self) -> None:
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core import kv_cache_utils

        self._has_sessions = "session_id" in BlockStored.__struct_fields__
        self._keys_of_block = kv_cache_utils.generate_block_hash_extra_keys
        # vLLM 0.30 and before publish keys as they are hashed.
        self._published = getattr(kv_cache_utils, "to_event_extra_keys", _as_hashed)

    def __call__(self, request: Request, numbers: Sequence[int], block_size: int) -> Details:
        """The end of a note, for these blocks of the request."""
        lora = request.lora_request
        return (
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            self._published(self._extra_keys(request, numbers, block_size)),
            getattr(request, "session_id", None) if self._has_sessions else None,
        )

    def _extra_keys(
        self, request: Request, numbers: Sequence[int], block_size: int
    ) -> list[ExtraKeys]:
        keys: list[ExtraKeys] = []
        has_own = request.mm_features or request.prompt_embeds is not None
        next_image = 0
        # Without images and embeddings all blocks but the request's first have the same keys.
        for number in numbers if has_own else numbers[:2]:
            start = number * block_size
            of_block, next_image = self._keys_of_block(
                request, start, start + block_size, next_image
            )
            keys.append(of_block)
        return keys + keys[-1:] * (len(numbers) - len(keys))


def _tokens(request: Request, start: int, end: int) -> tuple[list[int] | bytes, int, int]:
    """Token ids, and where in them these are."""
    all_ids, may_be_cut = request._all_token_ids, getattr(request, "resumable", True)
    if not may_be_cut and (packed := packed_tokens(request, start, end)) is not None:
        return packed, 0, end - start
    if len(all_ids) > 2 * (end - start) or may_be_cut:
        return all_ids[start:end], 0, end - start
    # vLLM only appends to it before the batch is encoded: a slice would touch each id once more.
    return all_ids, start, end


def _has_details(request: Request, first: int) -> bool:
    """Whether a note of blocks from number `first` on needs them."""
    return (
        request.lora_request is not None
        or bool(request.mm_features)
        or request.prompt_embeds is not None
        or (first == 0 and bool(request.cache_salt))
        or getattr(request, "session_id", None) is not None
    )


def _as_hashed(keys: list[ExtraKeys]) -> list[ExtraKeys] | None:
    return keys or None


def _kept(
    blocks: list[KVCacheBlock], first: int, end: int, block_mask: list[bool] | None
) -> list[int]:
    """The numbers of the blocks that are cached: neither null nor masked out."""
    return [
        number
        for number in range(first, end)
        if not blocks[number].is_null and (block_mask is None or block_mask[number - first])
    ]
