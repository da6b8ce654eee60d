"""SGLang's own radix caches, driven line by line. Runs in SGLang's interpreter, not in ours.

In:  one JSON object a line: a function of this file and its arguments.
Out: what it returned, in JSON, a line each.
"""

import json
import os
import random
import sys
from array import array

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import msgspec
import sglang
import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache import events, radix_cache
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvplug.engines.sglang_guard import objection
from kvplug.engines.sglang_recorder import recorder_for

NUM_TOKENS = 4096
LORA_ID = "0123456789abcdef" * 2
SALTS = (None, None, "tenant")
EXTRA_KEYS = (None, None, "a", LORA_ID, "a" + LORA_ID)
encode = msgspec.msgpack.Encoder().encode


class Slots:
    """What a RadixCache asks of an allocator."""

    device = "cpu"

    def free(self, indices):
        pass

    def free_segment(self, indices, *, start_pos=0):
        pass


def make_cache(kind, *, page_size, is_eagle=False, dynamo=False, enabled=True):
    names = KvEventLoraNames()
    names.register(lora_id=LORA_ID, lora_name="adapter")
    more = {
        "disable": False,
        "page_size": page_size,
        "enable_kv_cache_events": enabled,
        "is_eagle": is_eagle,
        "dynamo_kv_event_format": dynamo,
        "kv_event_lora_names": names,
    }
    if kind == "simple":
        pools = {"req_to_token_pool": None, "token_to_kv_pool_allocator": Slots()}
        return RadixCache(CacheInitParams(**pools, **more)), names
    set_global_server_args_for_scheduler(
        ServerArgs(model_path="dummy", page_size=page_size, device="cpu")
    )
    how = {"dtype": torch.bfloat16, "device": "cpu"}
    pool = MHATokenToKVPool(
        size=NUM_TOKENS, page_size=page_size, head_num=1, head_dim=8, layer_num=1,
        enable_memory_saver=False, **how,
    )  # fmt: skip
    pools = {
        "req_to_token_pool": ReqToTokenPool(
            size=10, max_context_len=512, device="cpu", enable_memory_saver=False
        ),
        "token_to_kv_pool_allocator": TokenToKVPoolAllocator(
            size=NUM_TOKENS, kvcache=pool, need_sort=False, **how
        ),
    }
    return UnifiedRadixCache(
        CacheInitParams(
            **pools,
            **more,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=kind,
        )
    ), names


class Driver:
    """One cache."""

    def __init__(self, settings, has_recorder):
        self.cache, names = make_cache(**settings)
        self.owner = getattr(self.cache, "tree_core", self.cache)
        self.failures = []
        if has_recorder:
            recorder_for(self.owner, self.failures.append)
        for extra_key in EXTRA_KEYS:
            if extra_key and extra_key.endswith(LORA_ID):
                names.register(Registered(extra_key), "adapter")

    def insert(self, tokens, how):
        key = RadixKey(array("q", tokens), **how)
        value = torch.arange(len(tokens))
        self.cache.insert(InsertParams(key=key, value=value, session_id=None))

    def match(self, tokens, how):
        self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **how)))

    def evict(self, num_tokens):
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def reset(self):
        self.cache.reset()

    def move(self, place):
        """What a host tier says of one node, out of those that are there."""
        root = getattr(self.owner, "root_node", None)
        nodes, waiting = [], list(root.children.values())
        while waiting:
            nodes.append(waiting.pop())
            waiting += nodes[-1].children.values()
        if nodes:
            node = nodes[place % len(nodes)]
            self.owner.kv_events.record_store(node, medium=StorageMedium.CPU, session_id="s")
            self.owner.kv_events.record_remove(node, medium=StorageMedium.CPU)
            self.owner.kv_events.record_store(node, medium=StorageMedium.CPU)

    def take(self):
        return encode((0.0, self.cache.take_events())).hex()


class Registered:
    """What register asks of a request."""

    lora_id = LORA_ID

    def __init__(self, extra_key):
        self.extra_key = extra_key


def operations(rnd, num_operations, can_move):
    """Shared prefixes in several namespaces, splits, evictions, resets, tokens beyond 32 bits."""
    prefixes = [[rnd.randrange(2**17) for _ in range(48)] for _ in range(3)]
    prefixes.append([rnd.randrange(2**33) for _ in range(48)])
    kinds = ["insert"] * 8 + ["match"] * 3 + ["evict"] * 2 + ["take"] * 4 + ["move"] * 2 * can_move
    for _ in range(num_operations):
        kind = rnd.choice(kinds)
        if kind in ("insert", "match"):
            length = rnd.randrange(len(prefixes[0]))
            tokens = rnd.choice(prefixes)[:length] + [rnd.randrange(2**17) for _ in range(20)]
            how = {"extra_key": rnd.choice(EXTRA_KEYS), "cache_salt": rnd.choice(SALTS)}
            yield kind, tokens, how
        elif kind == "evict":
            yield kind, rnd.randrange(200)
        elif kind == "move":
            yield kind, rnd.randrange(1000)
        else:
            yield ("reset",) if rnd.random() < 0.04 else ("take",)
    yield ("take",)


def play(settings, seed, size, fails_at=None):
    """Two caches do the same things; only one has kvplug's recorder. For each take of the events,
    the payload of SGLang's own recorder and that of kvplug's, in hex, and what the latter told.

    From operation `fails_at` on, names of adapters and bytes of tokens cannot be had.
    """
    # A compiled tree has no nodes that could be named, and SGLang's RadixCache no host tier.
    can_move = settings["kind"] == "python"
    stock, ours = Driver(settings, has_recorder=False), Driver(settings, has_recorder=True)
    taken = []
    for number, (name, *arguments) in enumerate(operations(random.Random(seed), size, can_move)):
        if number == fails_at:
            ours.owner.kv_events._name_of = None
        results = [getattr(driver, name)(*arguments) for driver in (stock, ours)]
        if name == "take":
            taken.append([*results, [repr(each) for each in ours.failures]])
    return taken


def objection_to(kind, is_eagle=False):
    """What the guard says of a cache."""
    cache, _ = make_cache(kind, page_size=4, is_eagle=is_eagle)
    before = TreeNode.counter, UnifiedTreeNode.counter
    reason = objection(getattr(cache, "tree_core", cache))
    assert before == (TreeNode.counter, UnifiedTreeNode.counter)
    return reason


def doctored(kind, what):
    """The same, of an SGLang that is not as it was when kvplug's recorder was written."""
    module, name, value = CHANGES[what]
    former = getattr(module, name)
    setattr(module, name, value(former))
    try:
        return objection_to(kind)
    finally:
        setattr(module, name, former)


def other_hash(former):
    return lambda *args, **more: former(*args, **more) ^ 1


class OtherRecorder(KVCacheEventRecorder):
    pass


CHANGES = {
    "version": (sglang, "__version__", lambda _: "0.5.99"),
    "hash": (events, "hash_str_to_int64", other_hash),
    "conversion": (adapter, "namespaced_block_hash", other_hash),
    "field": (
        adapter,
        "BlockRemoved",
        lambda former: lambda **more: former(**{**more, "medium": "elsewhere"}),
    ),
    "recorder": (radix_cache, "KVCacheEventRecorder", lambda _: OtherRecorder),
    "signature": (RadixCache, "_split_node", lambda _: None),
}


def answer(line):
    job = json.loads(line)
    return globals()[job.pop("call")](**job)


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    replies.write('"ready"\n')
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(line)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
