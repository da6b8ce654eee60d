"""Whether the recorder says what vLLM says, tried at start-up on a small cache of this vLLM.

In:  the vLLM of this process.
Out: "", or why its events have to be its own.

Two caches of a few blocks, no memory behind them, see the same requests: one makes vLLM's events,
the other is recorded. Each batch must be the same bytes. Nothing of vLLM's process is changed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvplug.engines.vllm_notes import Expander
from kvplug.engines.vllm_prompts import PromptPacker
from kvplug.engines.vllm_recorder import Recorder, context_of, objection

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

KNOWN_VERSIONS: Final = ("0.28.0", "0.30.0", "0.31.0", "0.32.0")
"""Those of vLLM that `make test-releases` runs."""

_BLOCK_SIZE, _WINDOW, _NUM_BLOCKS = 4, 8, 15
_CHUNK: Final = 12


def refusal() -> str:
    """Why this process's vLLM is not recorded; "" if it can be. Does not raise."""
    try:
        return _unknown_version() or _difference()
    except Exception as error:  # noqa: BLE001  # vLLM's insides may have changed in any way
        return f"the trial of the recorder failed: {type(error).__name__}: {error}"


def _unknown_version() -> str:
    import vllm

    version = str(vllm.__version__).partition("+")[0]
    if version in KNOWN_VERSIONS:
        return ""
    return f"expected vLLM {', '.join(KNOWN_VERSIONS)}, got {version}"


def _difference() -> str:
    """What differs between vLLM's events and the recorder's; "" if nothing does."""
    with _quiet_pool():
        stock, recorded = _Cache(is_recorded=False), _Cache(is_recorded=True)
        for number, (said, noted) in enumerate(zip(_trial(stock), _trial(recorded), strict=True)):
            if said != noted:
                return f"batch {number} of the trial: {_first_difference(said, noted)}"
    return ""


def _first_difference(said: bytes, noted: bytes) -> str:
    expected, got = msgspec.msgpack.decode(said), msgspec.msgpack.decode(noted)
    for event, other in zip(expected, got, strict=False):
        for name in sorted(event.keys() | other.keys()):
            if event.get(name) != other.get(name):
                what = f"{event.get('type')}.{name}"
                return f"expected {what} {event.get(name)!r}, got {other.get(name)!r}"
    return f"expected {len(expected)} events, got {len(got)}, or the same in another form"


@contextmanager
def _quiet_pool() -> Iterator[None]:
    """Without vLLM's line that a cache was reset: it is not the engine's."""
    logger = logging.getLogger("vllm.v1.core.block_pool")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _trial(cache: _Cache) -> Iterator[bytes]:
    """The batches of: chunks, duplicates, salts, adapters, images, evictions, a request that goes
    on after it lost its blocks, a reset.
    """
    for number in range(3):  # the cache is smaller than all three together
        prompt = list(range(number, number + 26))
        requests = [
            cache.request(prompt),
            cache.request(prompt, cache_salt="salt"),
            cache.request(prompt, adapter="adapter" if number else "", session="session"),
            cache.request(prompt, image="image"),
        ]
        for request in requests:
            for _ in range(3):
                cache.compute(request, _CHUNK)
                yield cache.take()
            cache.decode(request, 3)
            yield cache.take()
            cache.free(request)
        twins = [cache.request(prompt[::-1][:10]) for _ in range(2)]
        for twin in twins:
            cache.compute(twin, _CHUNK)
        yield cache.take()
        for twin in twins:
            cache.free(twin)
        cache.resume(twins[0])
        yield cache.take()
    assert cache.manager.reset_prefix_cache()
    yield cache.take()


class _Cache:
    """A KVCacheManager with a full-attention group and one with a sliding window."""

    def __init__(self, *, is_recorded: bool) -> None:
        self.manager = _manager()
        self._published: list[Any] = []
        self._expand: Callable[[list[Any]], list[Any]] = list
        self._num_requests = 0
        self.request_block_hasher: Callable[[Request], list[Any]] = _hash_blocks  # as a core has it
        if is_recorded:
            PromptPacker(self)
            if reason := objection(self.manager):
                raise RuntimeError(reason)
            self._expand = Expander(context_of(self.manager)).expand
            Recorder(self.manager, self._published.extend, _raise)

    def request(
        self,
        prompt: list[int],
        *,
        cache_salt: str = "",
        adapter: str = "",
        image: str = "",
        session: str = "",
    ) -> Request:
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        where = PlaceholderRange(offset=_BLOCK_SIZE + 1, length=_BLOCK_SIZE)
        self._num_requests += 1
        request = Request(
            request_id=str(self._num_requests),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=100),
            pooling_params=None,
            cache_salt=cache_salt or None,
            lora_request=LoRARequest(adapter, 1, "/") if adapter else None,
            mm_features=[MultiModalFeatureSpec(None, "image", image, where)] if image else [],
            block_hasher=self.request_block_hasher,
        )
        request.session_id = session or None
        return request

    def compute(self, request: Request, num_tokens: int) -> None:
        """A chunk of the prompt, after what is in the cache."""
        found, num_found = None, 0
        if not request.num_computed_tokens:
            found, num_found = self.manager.get_computed_blocks(request)[:2]
        num_tokens = min(num_tokens, request.num_tokens - request.num_computed_tokens - num_found)
        allocated = self.manager.allocate_slots(
            request, num_tokens, num_new_computed_tokens=num_found, new_computed_blocks=found
        )
        assert allocated is not None
        request.num_computed_tokens += num_found + num_tokens

    def decode(self, request: Request, num_tokens: int) -> None:
        for number in range(num_tokens):
            request.append_output_token_ids(number)
            self.compute(request, 1)

    def free(self, request: Request) -> None:
        self.manager.free(request)

    def resume(self, request: Request) -> None:
        """As after a preemption."""
        request.num_computed_tokens = 0
        self.compute(request, request.num_tokens)
        self.manager.free(request)

    def take(self) -> bytes:
        """All events since the last call, as they are published."""
        items = [*self._published, *self.manager.take_events()]
        self._published.clear()
        encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
        return encode(self._expand(decode(encode(items))))


def _raise(error: Exception) -> None:
    raise error


def _manager() -> KVCacheManager:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    sizes: dict[str, Any] = {
        "block_size": _BLOCK_SIZE,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**sizes, sliding_window=_WINDOW)),
    ]
    return KVCacheManager(
        KVCacheConfig(num_blocks=_NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=64,
        scheduler_block_size=_BLOCK_SIZE,
        hash_block_size=_BLOCK_SIZE,
        enable_caching=True,
        enable_kv_cache_events=True,
    )


def _hash_blocks(request: Request) -> list[Any]:
    """Instead of vLLM's hasher, whose seed is a global of the process."""
    known: list[bytes] = list(request.block_hashes)
    hashes = list(known)
    for start in range(len(known) * _BLOCK_SIZE, request.num_tokens, _BLOCK_SIZE):
        tokens = request.all_token_ids[start : start + _BLOCK_SIZE]
        if len(tokens) == _BLOCK_SIZE:
            parent = hashes[-1] if hashes else _seed_of(request)
            hashes.append(hashlib.sha256(parent + repr(tokens).encode()).digest())
    return hashes[len(known) :]


def _seed_of(request: Request) -> bytes:
    """Other keys, other hashes."""
    images = [each.identifier for each in request.mm_features]
    return repr((request.cache_salt, request.lora_request, images)).encode()
