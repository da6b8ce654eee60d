"""vLLM's own Scheduler without a model, driven line by line. Runs in vLLM's interpreter.

In:  one JSON object a line: sizes, and for each step the requests that arrive before it.
Out: one JSON array a line: what each step scheduled, preempted, emitted and published.
"""

import json
import os
import sys

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ.pop("PYTHONHASHSEED", None)  # it would seed the hashes

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.engines.vllm_pool_driver import plain

SHA256 = get_hash_fn_by_name("sha256")


class Batches:
    """Takes the place of the publisher."""

    def __init__(self):
        self.events = []

    def publish(self, batch):
        self.events += batch.events

    def take(self):
        events, self.events = self.events, []
        return events


class Driver:
    def __init__(self, model, sizes):
        self.block_size = sizes["block_size"]
        config = vllm_config(model, sizes)
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        num_blocks = config.cache_config.num_gpu_blocks = sizes["num_gpu_blocks"]
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            block_size=self.block_size,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
        )
        self.scheduler.kv_event_publisher = self.batches = Batches()
        self.hasher = get_request_block_hasher(self.block_size, SHA256)
        self.requests = {}

    def submit(self, name, prompt, max_tokens):
        self.requests[name] = request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)

    def step(self):
        before = {name: request.num_preemptions for name, request in self.requests.items()}
        plan = self.scheduler.schedule()
        tokens = {
            name: [self.sample(name)] if self.is_up_to_date(name) else []
            for name in plan.num_scheduled_tokens
        }
        output = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={name: index for index, name in enumerate(tokens)},
            sampled_token_ids=list(tokens.values()),
        )
        self.scheduler.update_from_output(plan, output)
        return {
            "chunks": list(plan.num_scheduled_tokens.items()),
            "preempted": sorted(
                name for name, num in before.items() if self.requests[name].num_preemptions > num
            ),
            "emitted": [name for name, ids in tokens.items() if ids],
            "events": list(map(plain, self.batches.take())),
            "running": [request.request_id for request in self.scheduler.running],
            "num_waiting": len(self.scheduler.waiting),
            "usage": self.scheduler.kv_cache_manager.usage,
        }

    def is_up_to_date(self, name):
        request = self.requests[name]
        return request.num_computed_tokens == request.num_tokens

    def sample(self, name):
        return self.requests[name].num_tokens % 3


def vllm_config(model, sizes):
    model_config = ModelConfig(
        model=model, dtype="bfloat16", max_model_len=sizes["max_model_len"], seed=0
    )
    return VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=sizes["max_num_seqs"],
            max_num_batched_tokens=sizes["max_num_batched_tokens"],
            max_model_len=sizes["max_model_len"],
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=sizes["block_size"], enable_prefix_caching=True),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )


def answer(model, line):
    job = json.loads(line)
    driver = Driver(model, job["sizes"])
    steps = []
    for arrivals in job["arrivals"]:
        for arrival in arrivals:
            driver.submit(*arrival)
        steps.append(driver.step())
    return steps


def main(model):
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    init_none_hash(SHA256)
    replies.write('"ready"\n')
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(model, line)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
