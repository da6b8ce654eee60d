"""vLLM's events beside the recorder's, batch by batch. Runs in vLLM's interpreter, not in ours.

usage: python -m tests.engines.vllm_recorded_pools RESULT.json

Two KVCacheManagers get the same requests: one makes vLLM's events, the other is recorded. A batch
is what a step publishes; its encoded bytes must be the same.

Out: {"vllm": version, "guard": refusal, "workloads": {name: {"batches", "events", "difference"}}},
events by kind: stored, removed, cleared.
"""

import json
import logging
import os
import random
import sys
from collections import Counter
from pathlib import Path

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ.pop("PYTHONHASHSEED", None)  # it would seed the hashes

import msgspec
import torch
import vllm
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvplug.engines import vllm_guard
from kvplug.engines.vllm_notes import Expander
from kvplug.engines.vllm_prompts import PromptPacker
from kvplug.engines.vllm_recorder import Recorder, context_of, objection

logging.getLogger("vllm.v1.core.block_pool").disabled = True  # its lines about resets

SHA256 = get_hash_fn_by_name("sha256")
BLOCK, NUM_BLOCKS = 4, 40


class Side:
    """One manager with requests of its own; `take` gives a batch's events, encoded."""

    def __init__(self, groups, is_recorded):
        hash_block_size = min(each.kv_cache_spec.block_size for each in groups)
        self.hasher = get_request_block_hasher(hash_block_size, SHA256)
        self.request_block_hasher = self.hasher  # where an engine core has it
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1000,
            scheduler_block_size=max(each.kv_cache_spec.block_size for each in groups),
            hash_block_size=hash_block_size,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.pool = self.manager.block_pool
        self.requests, self.published, self.expand, self.recorder = {}, [], list, None
        if is_recorded:
            PromptPacker(self)
            assert objection(self.manager) == ""
            context = msgspec.msgpack.decode(msgspec.msgpack.encode(context_of(self.manager)))
            self.expand = Expander(context).expand
            self.failures = []
            self.recorder = Recorder(self.manager, self.published.extend, self.failures.append)

    def submit(self, name, prompt, *, lora=None, salt=None, images=(), embeds=None, **more):
        """A request; `more` is for vLLM's Request, `extra` for its sampling parameters."""
        extra = more.pop("extra", None)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            prompt_embeds=embeds,
            sampling_params=SamplingParams(max_tokens=900, extra_args=extra),
            pooling_params=None,
            lora_request=lora and LoRARequest(lora, 7, f"/adapters/{lora}"),
            cache_salt=salt,
            mm_features=[
                MultiModalFeatureSpec(None, "image", image, PlaceholderRange(offset, length))
                for image, offset, length in images
            ],
            # Some are from before there was a recorder.
            block_hasher=self.hasher if len(self.requests) % 2 else self.request_block_hasher,
            **more,
        )
        self.requests[name] = request

    def admit(self, name, num_tokens=1000):
        """Look the request up and compute its first chunk; whether there was room."""
        request = self.requests[name]
        blocks, num_hits = self.manager.get_computed_blocks(request)[:2]
        num_tokens = min(num_tokens, request.num_tokens - num_hits)
        allocated = self.manager.allocate_slots(
            request, num_tokens, num_new_computed_tokens=num_hits, new_computed_blocks=blocks
        )
        if allocated is not None:
            request.num_computed_tokens = num_hits + num_tokens
        return allocated is not None

    def compute(self, name, num_tokens=1000):
        request = self.requests[name]
        num_tokens = min(num_tokens, request.num_tokens - request.num_computed_tokens)
        if not num_tokens or self.manager.allocate_slots(request, num_tokens) is None:
            return False
        request.num_computed_tokens += num_tokens
        return True

    def decode(self, name, token_id):
        self.requests[name].append_output_token_ids(token_id)
        return self.compute(name, 1)

    def append(self, name, token_id):
        """A token that comes after what is being computed, before the batch is taken."""
        self.requests[name].append_output_token_ids(token_id)

    def free(self, name):
        """At its end, or preempted: `admit` goes on with it."""
        self.manager.free(self.requests[name])
        self.requests[name].num_computed_tokens = 0

    def cache_part(self, name, num_tokens, block_size):
        """A hash inside a block, as for models with states."""
        block = self.manager.get_blocks(name).blocks[0][num_tokens // block_size]
        self.pool.cache_partial_block(self.requests[name], block, num_tokens, 0, block_size)

    def evict(self, name):
        self.manager.evict_blocks(set(self.manager.get_block_ids(name)[0]))

    def reset(self):
        return self.manager.reset_prefix_cache()

    def break_recorder(self):
        """The next store of the recorder fails."""
        if self.recorder is not None:
            self.recorder._details_of = None

    def take(self):
        items = [*self.published, *self.manager.take_events()]
        self.published.clear()
        noted = msgspec.msgpack.decode(msgspec.msgpack.encode(items))
        return msgspec.msgpack.encode(self.expand(noted))


class Pair:
    """Both sides; any operation of a Side is done on each and must return the same."""

    def __init__(self, groups):
        self.stock, self.recorded = Side(groups, False), Side(groups, True)
        self.num_batches, self.events, self.differences = 0, Counter(), []

    def __getattr__(self, operation):
        def both(*arguments, **more):
            results = [
                getattr(side, operation)(*arguments, **more) for side in (self.stock, self.recorded)
            ]
            assert results[0] == results[1], (operation, results)
            return results[0]

        return both

    def step(self):
        said, noted = self.stock.take(), self.recorded.take()
        self.num_batches += 1
        self.events.update(each["type"] for each in msgspec.msgpack.decode(said))
        if said != noted:
            self.differences.append(vllm_guard._first_difference(said, noted))


def full(block_size=BLOCK):
    sizes = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    return KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=block_size, **sizes))


def window(block_size=BLOCK, tokens=12):
    sizes = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16, "sliding_window": tokens}
    return KVCacheGroupSpec(["window"], SlidingWindowSpec(block_size=block_size, **sizes))


def serve(pair, name, prompt, *, chunk=1000, num_output=6, **more):
    """One request from its start to its end, a step at a time."""
    pair.submit(name, prompt, **more)
    assert pair.admit(name, chunk)
    pair.step()
    while pair.compute(name, chunk):
        pair.step()
    for token_id in range(num_output):
        assert pair.decode(name, token_id)
        pair.step()
    pair.free(name)


def plain(pair):
    for number in range(8):
        serve(pair, str(number), list(range(30 + 7 * number)))


def appended_before_taken(pair):
    pair.submit("one", list(range(30)))
    pair.admit("one")
    pair.append("one", 99_999)
    pair.step()


def adapters(pair):
    for number, lora in enumerate(("a", "b", None, "a")):
        serve(pair, str(number), list(range(41)), lora=lora, salt="s" if number == 3 else None)


def salts_in_chunks(pair):
    for number, salt in enumerate(("x", "y", None, "x", "")):
        serve(pair, str(number), list(range(50)), salt=salt, chunk=10)


def images(pair):
    """At a block's start, across blocks, two in one block, the last across a chunk's end."""
    several = [("cat", 4, 4), ("dog", 10, 9), ("cow", 20, 1), ("cat", 21, 2), ("fox", 30, 12)]
    serve(pair, "one", list(range(60)), images=several, chunk=16)
    serve(pair, "two", list(range(60)), images=several[:2], lora="a", salt="s")
    serve(pair, "three", list(range(30)), images=[("cat", 0, 30)])


def embeddings(pair):
    generator = torch.Generator().manual_seed(3)
    embeds = torch.rand((30, 8), generator=generator)
    serve(pair, "one", None, embeds=embeds, chunk=10)
    serve(pair, "two", None, embeds=embeds[:20], salt="s")


def sessions(pair):
    if "session_id" in Request.__init__.__code__.co_varnames:
        serve(pair, "one", list(range(30)), session_id="abc")
        serve(pair, "two", list(range(40)), session_id="def", salt="s", lora="a")


def evictions(pair):
    for number in range(12):
        serve(pair, str(number), [number * 1000 + each for each in range(60)])
    pair.submit("evicted", list(range(60)))
    pair.admit("evicted")
    pair.step()
    pair.evict("evicted")
    pair.step()


def resets(pair):
    for number in range(3):
        serve(pair, f"{number}", list(range(40)))
        assert pair.reset()
        pair.step()
    pair.submit("busy", list(range(9)))
    pair.admit("busy")
    assert not pair.reset()
    pair.step()


def duplicates(pair):
    for name in ("a", "b", "c"):
        pair.submit(name, list(range(33)))
        pair.admit(name)
    pair.step()
    for number, name in enumerate(("a", "b", "c")):
        pair.decode(name, number)
        pair.free(name)
    for number in range(4):
        serve(pair, str(number), [number * 1000 + each for each in range(60)])


def preemptions(pair):
    pair.submit("a", list(range(50)))
    pair.admit("a", 30)
    pair.step()
    pair.free("a")
    serve(pair, "b", list(range(1000, 1070)))
    pair.admit("a", 20)
    pair.step()
    while pair.compute("a", 20):
        pair.step()


def full_reports(pair):
    for number in range(3):
        mode = {"kv_cache_report_mode": "full"}
        serve(pair, str(number), list(range(40)), extra=mode, salt="s" if number else None)


def parts_of_blocks(pair):
    serve(pair, "first", list(range(60)), num_output=0)
    pair.submit("one", list(range(100, 130)))
    pair.admit("one", 28)
    pair.cache_part("one", 28, 8)
    pair.step()
    pair.compute("one")
    pair.step()
    for token_id in range(12):
        pair.decode("one", token_id)
        pair.step()


class RandomOperations:
    """What a scheduler may do, in any order."""

    def __init__(self, pair, seed):
        self.pair, self.rnd = pair, random.Random(seed)
        self.prefixes = [[self.rnd.randrange(50_000) for _ in range(40)] for _ in range(3)]
        self.running, self.waiting, self.num_requests = [], [], 0

    def submit(self):
        name, prefix = str(self.num_requests), self.rnd.choice(self.prefixes)
        prompt = prefix[: self.rnd.randrange(1, 40)] + prefix[: self.rnd.randrange(20)]
        lora, salt = self.rnd.choice((None, None, "a")), self.rnd.choice((None, None, "s"))
        at = self.rnd.randrange(len(prompt))
        some = [("cat", at, len(prompt) - at)] if self.rnd.random() < 0.2 else ()
        self.pair.submit(name, prompt, lora=lora, salt=salt, images=some)
        self.num_requests += 1
        self.waiting.append(name)

    def admit(self):
        if self.waiting:
            name = self.waiting.pop(0)
            was_admitted = self.pair.admit(name, self.rnd.randrange(1, 60))
            (self.running if was_admitted else self.waiting).append(name)

    def compute(self):
        if self.running:
            self.pair.compute(self.rnd.choice(self.running), self.rnd.randrange(1, 30))

    def decode(self):
        if self.running:
            self.pair.decode(self.rnd.choice(self.running), self.rnd.randrange(50_000))

    def free(self):
        if self.running:
            name = self.running.pop(self.rnd.randrange(len(self.running)))
            self.pair.free(name)
            self.waiting += [name] if self.rnd.random() < 0.3 else []

    def reset(self):
        if not self.running and self.rnd.random() < 0.3:
            self.pair.reset()

    def step(self):
        self.pair.step()


def random_operations(pair):
    for seed in range(3):
        operations = RandomOperations(pair, seed)
        weights = {"submit": 2, "admit": 3, "compute": 2, "decode": 6, "free": 1, "reset": 1}
        names, counts = zip(*(weights | {"step": 3}).items(), strict=True)
        for name in operations.rnd.choices(names, counts, k=400):
            getattr(operations, name)()
        for name in operations.running:
            pair.free(name)
        pair.reset()
        pair.step()


def failure(pair):
    """vLLM's own events go on where the recorder ended."""
    serve(pair, "before", list(range(30)), salt="s")
    pair.break_recorder()
    pair.submit("broken", list(range(50, 80)), salt="s")
    assert pair.admit("broken")
    [error] = pair.recorded.failures
    assert isinstance(error, TypeError)
    assert pair.stock.take() != pair.recorded.take()  # this one is lost
    for number in range(8):
        serve(pair, str(number), list(range(30 + 7 * number)))
    assert pair.recorded.failures == [error]


HYBRID, TWO_SIZES = (full(), window()), (full(8), window(4, 8))
WORKLOADS = [
    *((each, (full(),)) for each in (plain, appended_before_taken, adapters, salts_in_chunks)),
    *((each, (full(),)) for each in (images, embeddings, sessions, evictions, resets, duplicates)),
    *((each, (full(),)) for each in (preemptions, full_reports, random_operations, failure)),
    *((each, HYBRID) for each in (plain, salts_in_chunks, images, full_reports, random_operations)),
    *((each, TWO_SIZES) for each in (plain, images, resets, parts_of_blocks, random_operations)),
]


def run(workload, groups):
    pair = Pair(list(groups))
    workload(pair)
    pair.step()
    events = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
    return {
        "batches": pair.num_batches,
        "events": [pair.events[name] for name in events],
        "difference": (pair.differences or [""])[0],
    }


def main(result_path):
    init_none_hash(SHA256)
    kinds = {1: "", 2: " hybrid"}
    workloads = {}
    for workload, groups in WORKLOADS:
        sizes = " two sizes" if groups is TWO_SIZES else kinds[len(groups)]
        workloads[f"{workload.__name__}{sizes}"] = run(workload, groups)
    result = {"vllm": vllm.__version__, "guard": vllm_guard.refusal(), "workloads": workloads}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
