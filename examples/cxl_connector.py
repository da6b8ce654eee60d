r"""A vLLM KV connector that moves blocks of finished requests into a pool which engines share.

In:  a folder that stands for a CXL pool (shared memory will do), vLLM 0.32 with one KV cache group.
Out: blocks in the pool, found again by every engine that has the folder; CXL states among vLLM's
events, as kvplug's plug-in carries them to routers.

    vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "publisher": "kvplug"}' \
      --kv-transfer-config '{"kv_connector": "CxlConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "examples.cxl_connector",
        "kv_connector_extra_config": {"folder": "/dev/shm/pool", "pool_id": 3, "num_blocks": 1000}}'

A block goes local_gpu -> in_transit -> cxl_pooled -> evicted. `workers` in the extra config names
who can read the pool; without it, those that say so (KVPLUG_CXL_POOLS=3). A request may name the
expert that its blocks belong to: `"kv_transfer_params": {"moe": [LAYER, EXPERT]}`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplug.engines.connector_events import BlockLabels, CxlStateTransition
from kvplug.events import CxlState, MoeLabel

Block = tuple[bytes, int]  # its hash, and its place on the GPU


class Pool:
    """A file for each block, under its hash: the pages of all layers."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def has(self, block_hash: bytes) -> bool:
        return self._file(block_hash).exists()

    def read(self, block_hash: bytes) -> list[torch.Tensor]:
        pages: list[torch.Tensor] = torch.load(self._file(block_hash), weights_only=True)
        return pages

    def write(self, block_hash: bytes, pages: list[torch.Tensor]) -> None:
        whole = self._file(block_hash)
        torch.save(pages, part := whole.with_suffix(".part"))
        part.rename(whole)  # nobody reads half a block

    def evict(self, block_hash: bytes) -> None:
        self._file(block_hash).unlink(missing_ok=True)

    def _file(self, block_hash: bytes) -> Path:
        return self._folder / block_hash.hex()


@dataclass
class Copies(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not there to check
    """What a step copies: from the pool; to the pool, by request."""

    loads: list[Block] = field(default_factory=list)
    saves: dict[str, list[Block]] = field(default_factory=dict)


class CxlConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """What vLLM calls: half of it in the scheduler, half in the workers."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        pool = Pool(settings["folder"])
        if role is KVConnectorRole.SCHEDULER:
            block_size = vllm_config.cache_config.block_size
            self._scheduler = SchedulerSide(pool, settings, block_size)
        else:
            self._worker = WorkerSide(pool)

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.gpu = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduler.find(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.load(request, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Copies:
        return self._scheduler.next_copies()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return self._scheduler.save(request, block_ids), None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.note_saved(connector_output.finished_sending or ())

    def take_events(self) -> Sequence[CxlStateTransition | BlockLabels]:
        return self._scheduler.take_events()

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        self._worker.load(self._get_connector_metadata().loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        return self._worker.save(self._get_connector_metadata().saves), None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when they have started."""

    def save_kv_layer(self, *layer: object, **kwargs: object) -> None:
        """Blocks are saved when their request has ended."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""


class SchedulerSide:
    """What is where, and the events that say so."""

    gpu: BlockPool

    def __init__(self, pool: Pool, settings: dict[str, Any], block_size: int) -> None:
        self._pool, self._size = pool, block_size
        self._place = settings["pool_id"], settings.get("workers")
        self._num_blocks: int = settings["num_blocks"]
        self._copies, self._found = Copies(), dict[str, tuple[int, int]]()
        self._moving = dict[str, list[Block]]()
        self._mine = OrderedDict[bytes, None]()  # what this engine has put into the pool
        self._leaving, self._labelled = set[int](), dict[str, Request]()
        self._events: list[CxlStateTransition | BlockLabels] = []

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """How many more tokens the pool has; the last token of a prompt is always computed."""
        first, end = num_computed_tokens // self._size, (request.num_tokens - 1) // self._size
        found = list(takewhile(self._pool.has, request.block_hashes[first:end]))
        self._found[request.request_id] = first, first + len(found)
        return len(found) * self._size

    def load(self, request: Request, block_ids: list[int]) -> None:
        first, end = self._found.pop(request.request_id, (0, 0))
        self._copies.loads += zip(
            request.block_hashes[first:end], block_ids[first:end], strict=True
        )
        if "moe" in (request.kv_transfer_params or {}):
            self._labelled[request.request_id] = request

    def next_copies(self) -> Copies:
        copies, self._copies = self._copies, Copies()
        return copies

    def save(self, request: Request, block_ids: list[int]) -> bool:
        """Whether the blocks must stay until they are saved."""
        whole = request.num_computed_tokens // self._size
        moving = {each for blocks in self._moving.values() for each, _ in blocks}
        blocks = [
            (each, block_id)
            for each, block_id in zip(request.block_hashes[:whole], block_ids, strict=False)
            if each not in moving and not self._pool.has(each)
        ]
        if blocks:
            self._moving[request.request_id] = self._copies.saves[request.request_id] = blocks
            self._tell(CxlState.IN_TRANSIT, [each for each, _ in blocks], *self._place)
        return bool(blocks)

    def note_saved(self, request_ids: Iterable[str]) -> None:
        for blocks in map(self._moving.pop, request_ids):
            hashes = [each for each, _ in blocks]
            self._mine.update(dict.fromkeys(reversed(hashes)))  # the ends of prompts go first
            self._leaving.update(block_id for _, block_id in blocks)
            self._tell(CxlState.CXL_POOLED, hashes)  # in the pool that in_transit named
        self._make_room()

    def take_events(self) -> Sequence[CxlStateTransition | BlockLabels]:
        """Called once a step, when vLLM has taken its own events."""
        labels = [_labels(request) for request in self._labelled.values()]
        running = self._labelled.items()
        self._labelled = {name: each for name, each in running if not each.is_finished()}
        events, self._events = [*labels, *self._events], []
        # What moved leaves the GPU. vLLM tells it with its next step: after cxl_pooled, as it must.
        self.gpu.evict_blocks(self._leaving)
        self._leaving.clear()
        return events

    def _make_room(self) -> None:
        evicted = []
        while len(self._mine) > self._num_blocks:
            evicted.append(self._mine.popitem(last=False)[0])
            self._pool.evict(evicted[-1])
        if evicted:
            self._tell(CxlState.EVICTED, evicted)

    def _tell(self, state: CxlState, hashes: Iterable[bytes], *place: Any) -> None:  # noqa: ANN401
        names = [maybe_convert_block_hash(each) for each in hashes]
        self._events.append(CxlStateTransition(names, state, *place))


class WorkerSide:
    """The copies themselves; a layer has a page for each block."""

    layers: list[torch.Tensor]

    def __init__(self, pool: Pool) -> None:
        self._pool, self._failed = pool, set[int]()

    def load(self, blocks: Iterable[Block]) -> None:
        for block_hash, block_id in blocks:
            try:
                pages = self._pool.read(block_hash)
            except FileNotFoundError:  # evicted by another engine since it was found
                self._failed.add(block_id)
                continue
            for layer, page in zip(self.layers, pages, strict=True):
                layer[block_id] = page.to(layer.device)

    def save(self, blocks_of: dict[str, list[Block]]) -> set[str]:
        for blocks in blocks_of.values():
            for block_hash, block_id in blocks:
                pages = [layer[block_id].cpu().clone() for layer in self.layers]
                self._pool.write(block_hash, pages)
        return set(blocks_of)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def _labels(request: Request) -> BlockLabels:
    layer, expert = request.kv_transfer_params["moe"]
    names = [maybe_convert_block_hash(each) for each in request.block_hashes]
    return BlockLabels(names, MoeLabel(layer, expert))
