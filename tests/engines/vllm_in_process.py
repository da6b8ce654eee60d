"""Run by vLLM's own interpreter: real vLLM in this process, its events (from the stock publisher
or from kvplug's) over a real socket into an index, and at the end the index against the engine's
own block pool.

usage: python -m tests.engines.vllm_in_process MODEL_DIR EVENTS_PORT {zmq,kvplug} RESULT

Writes one JSON object to the file RESULT.
"""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


from vllm import LLM, SamplingParams, TokensPrompt, __version__
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from kvplug.engines.vllm import register
from tests.engines.start_plugin.published import kind_of, last_number

BLOCK_SIZE, NUM_BLOCKS = 32, 64
SETTLE_LIMIT_S = 300.0  # the first batch waits until Numba has compiled, on whatever core is left


class Following:
    """A router that follows the engine over its stock event socket."""

    def __init__(self, port):
        # vLLM 0.32 for the CPU looks through all loaded modules while its worker starts and trips
        # over llvmlite (triton_utils/dispatcher.py:139), so Numba may come only after that.
        from kvplug import Rank, Router, RouterConfig
        from kvplug.ingest.event_thread import EventThread
        from kvplug.ingest.follower import Follower

        self.rank = Rank("engine")
        self.router = Router(RouterConfig(block_size=BLOCK_SIZE))
        self.router.add_worker(self.rank.worker)
        self.follower, self.listener = Follower(self.router, self.rank), EventThread()
        self.listener.start()
        self.listener.follow(self.follower, f"tcp://127.0.0.1:{port}")
        wait_until(lambda: self.follower.connected, "the event stream is connected")

    def settle(self, engine):
        """Wait until every batch that the engine published is applied."""
        wait_until(lambda: engine.last() is not None, "every batch is in a message")
        last = engine.last()
        wait_until(lambda: self.follower.sequencer.last == last, "every batch has arrived")

    def expected_tokens(self, tokens, salt):
        """What vLLM should find cached: whole blocks, and never the last token."""
        from kvplug import Namespace
        from kvplug.hashing import as_tokens, seed_of

        index, seed = self.router.index, seed_of(Namespace(salt=salt))
        hashes = index.hasher.sequence_hashes(as_tokens(tokens), seed)
        depth = int(index.overlap(hashes, now_s=0.0).depth[0])
        return min(depth, (len(tokens) - 1) // BLOCK_SIZE) * BLOCK_SIZE

    def cached_blocks(self):
        """What the index has of the engine, under the engine's ids."""
        return {int(name) for name in self.router.index.engine_hashes_of(self.rank)}


class Engine:
    """vLLM with a tap on its publisher: how many batches went out, with how many copies."""

    def __init__(self, model_dir, port, publisher):
        if publisher == "kvplug":
            register()  # before the config: LLM(...) loads plug-ins only later
        address = "*" if publisher == "zmq" else "127.0.0.1"
        events = KVEventsConfig(
            enable_kv_cache_events=True, publisher=publisher, endpoint=f"tcp://{address}:{port}"
        )
        self.llm = LLM(
            model_dir,
            dtype="float16",
            enforce_eager=True,
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_seqs=8,
            kv_events_config=events,
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.num_batches, self.num_events, self.most_copies, self.outputs = 0, {}, 1, []
        self.publisher = scheduler.kv_event_publisher
        self._publish = self.publisher.publish
        scheduler.kv_event_publisher.publish = self._count_and_publish

    def _count_and_publish(self, batch):
        self.num_batches += 1
        for event in batch.events:
            kind = kind_of(event)
            self.num_events[kind] = self.num_events.get(kind, 0) + 1
        self.most_copies = max(self.most_copies, self._most_copies())
        self._publish(batch)

    def last(self):
        """The number of the last message; None while a batch is on its way to one."""
        return last_number(self.publisher, self.num_batches)

    def generate(self, prompts, max_tokens=4):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        self.outputs += [list(each.outputs[0].token_ids) for each in outputs]
        return outputs

    def cached_blocks(self):
        """What the engine's pool has, under the ids that its events use."""
        keys = self.pool.cached_block_hash_to_block._cache
        return {maybe_convert_block_hash(get_block_hash(key)) for key in keys}

    def _most_copies(self):
        """How often the pool has the block that it has most often."""
        cache = self.pool.cached_block_hash_to_block._cache.values()
        return max((len(blocks) for blocks in cache if isinstance(blocks, dict)), default=1)


def prompt(tokens, salt=None):
    return TokensPrompt(prompt_token_ids=list(tokens), **({"cache_salt": salt} if salt else {}))


def wait_until(condition, what):
    deadline = time.monotonic() + SETTLE_LIMIT_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"timed out waiting until {what}")
        pause.wait(0.01)


def workload(engine, rnd):
    """Shared prefixes, evictions, duplicates in one step (stored twice), salts, two resets."""
    prefixes = [[rnd.randrange(10, 4000) for _ in range(256)] for _ in range(6)]
    for round_ in range(30):
        batch = [
            prompt(
                rnd.choice(prefixes) + [rnd.randrange(10, 4000) for _ in range(rnd.randrange(90))],
                salt=rnd.choice([None, None, "tenant-a", "tenant-b"]),
            )
            for _ in range(rnd.randrange(1, 4))
        ]
        reference = prompt([rnd.randrange(10, 4000) for _ in range(160)])
        engine.generate([*batch, reference, reference], max_tokens=rnd.choice([1, 40]))
        if round_ in (9, 19):
            assert engine.llm.reset_prefix_cache()


def predictions(engine, following, rnd):
    """[(tokens that the router expects to be cached, tokens that the engine reports)]."""
    pairs = []
    prefixes = [[rnd.randrange(10, 4000) for _ in range(200)] for _ in range(3)]
    for _ in range(24):
        tokens = rnd.choice(prefixes)[: rnd.randrange(1, 200)]
        tokens = tokens + [rnd.randrange(10, 4000) for _ in range(rnd.randrange(1, 60))]
        salt = rnd.choice(["", "tenant-a"])
        following.settle(engine)
        expected = following.expected_tokens(tokens, salt)
        [output] = engine.generate([prompt(tokens, salt)])
        pairs.append((expected, output.num_cached_tokens))
    return pairs


def main(model_dir, port, publisher, result_path):
    rnd = random.Random(7)
    engine = Engine(model_dir, port, publisher)
    following = Following(port)
    workload(engine, rnd)
    pairs = predictions(engine, following, rnd)
    engine.generate([prompt(range(10, 100))])  # a last step publishes what waits
    following.settle(engine)
    following.router.index.check()
    in_engine, in_index = engine.cached_blocks(), following.cached_blocks()
    following.listener.stop()
    follower = following.follower
    result = {
        "vllm": __version__,
        "numba": sys.modules["numba"].__version__,
        "num_in_engine": len(in_engine),
        "num_missing_in_index": len(in_engine - in_index),
        "num_extra_in_index": len(in_index - in_engine),
        "num_events": engine.num_events,
        "most_copies": engine.most_copies,
        "num_removed": follower.num_removed,
        "incomplete": follower.trust.reason,
        "skipped": dict(follower.skipped),
        "predictions": pairs,
        "is_recorded": getattr(engine.publisher, "recorder", None) is not None,
        "outputs": engine.outputs,
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
