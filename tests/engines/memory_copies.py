"""Run by vLLM's own interpreter: an offloading backend for the CPU, where vLLM's own is for GPUs.

In:  KV caches in memory, and copies that vLLM's offloading connector asks for.   Out: the copies.

Everything else is vLLM's (0.32): the connector, its manager with lookups and evictions, its events.
`kv_connector_extra_config` names it: spec_name MemoryCopies, spec_module_path memory_copies.
"""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemoryCopies(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = Copier(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class Copier(OffloadingWorker):
    """Copies at once; each chunk is so many blocks in a row."""

    def __init__(self, kv_caches, blocks_per_chunk, num_chunks):
        self._per_chunk, self._finished = blocks_per_chunk, []
        self._device = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._host = [
            torch.zeros(num_chunks * blocks_per_chunk, pages.shape[1], dtype=torch.int8)
            for pages in self._device
        ]

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, self._device, self._host)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, self._device, self._host, is_load=True)

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass

    def _copy(self, job_id, device_spec, host_spec, device, host, *, is_load=False):
        at = torch.as_tensor(list(device_spec.block_ids))
        places = torch.as_tensor(list(self._places(device_spec, list(host_spec.block_ids))))
        for pages, copies in zip(device, host, strict=True):
            if is_load:
                pages[at] = copies[places]
            else:
                copies[places] = pages[at]
        self._finished.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def _places(self, device_spec, chunks):
        """Where the copy of each block is; a group may begin and end within a chunk."""
        for num_blocks, first in zip(
            device_spec.group_sizes, device_spec.block_indices, strict=True
        ):
            skipped = first % self._per_chunk
            num_chunks = -(-(skipped + num_blocks) // self._per_chunk) if num_blocks else 0
            mine, chunks = chunks[:num_chunks], chunks[num_chunks:]
            flat = [chunk * self._per_chunk + i for chunk in mine for i in range(self._per_chunk)]
            yield from flat[skipped : skipped + num_blocks]
