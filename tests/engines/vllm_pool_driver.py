"""vLLM's own KVCacheManager, driven line by line. Runs in vLLM's interpreter, not in ours.

In:  one JSON object a line: the sizes of a cache, and the operations to do on it.
Out: one JSON array a line: what each operation returned, and what it left behind.
"""

import json
import os
import sys

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ.pop("PYTHONHASHSEED", None)  # it would seed the hashes

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

SHA256 = get_hash_fn_by_name("sha256")


class Driver:
    def __init__(self, num_blocks, block_size, max_model_len):
        self.hasher = get_request_block_hasher(block_size, SHA256)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=max_model_len,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.requests = {}

    def submit(self, name, prompt, salt, lora):
        self.requests[name] = Request(
            request_id=str(name),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            lora_request=lora and LoRARequest(lora[0], 1, lora[1]),
            cache_salt=salt or None,
            block_hasher=self.hasher,
        )

    def admit(self, name, num_tokens):
        request = self.requests[name]
        blocks, num_hits, _ = self.manager.get_computed_blocks(request)
        num_tokens = min(num_tokens, request.num_tokens - num_hits)
        allocated = self.manager.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
        )
        if allocated is not None:
            request.num_computed_tokens = num_hits + num_tokens
        return [num_hits, allocated is not None]

    def compute(self, name, num_tokens):
        request = self.requests[name]
        allocated = self.manager.allocate_slots(request, num_tokens)
        if allocated is not None:
            request.num_computed_tokens += num_tokens
        return allocated is not None

    def append(self, name, token_id):
        self.requests[name].append_output_token_ids(token_id)

    def free(self, name):
        self.manager.free(self.requests[name])
        self.requests[name].num_computed_tokens = 0

    def reset(self):
        return self.manager.reset_prefix_cache()

    def state(self):
        pool = self.manager.block_pool
        return {
            "events": list(map(plain, self.manager.take_events())),
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "references": [block.ref_cnt for block in pool.blocks[1:]],
            "usage": self.manager.usage,
            "blocks": {
                name: list(self.manager.get_block_ids(str(name))[0]) for name in self.requests
            },
        }


def plain(event):
    if isinstance(event, BlockStored):
        assert (event.medium, event.group_idx) == ("GPU", 0)
        assert event.kv_cache_spec_kind == "full_attention"
        return [
            "stored",
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_name,
            event.extra_keys,
        ]
    if isinstance(event, BlockRemoved):
        return ["removed", event.block_hashes]
    return ["cleared"]


def answer(line):
    job = json.loads(line)
    driver = Driver(**job["sizes"])
    answers = []
    for operation, *arguments in job["operations"]:
        result = getattr(driver, operation)(*arguments)
        answers.append([result, driver.state()])
    return answers


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    init_none_hash(SHA256)
    replies.write('"ready"\n')
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(line)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
