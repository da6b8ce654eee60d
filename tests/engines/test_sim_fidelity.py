"""The simulated cache and scheduler against vLLM's own, operation by operation.

Hypothesis draws a workload; it is played here on the simulation and in vLLM's interpreter on its
KVCacheManager or its Scheduler. After each operation on the cache both have the same result, events
(hash ids included), eviction order, references and blocks per request, physical numbers too; after
each step of the scheduler the same chunks, preemptions, tokens and events.
"""

import json
import os
import subprocess
from collections import Counter
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from kvplug import wire
from kvplug.events import BlockRemoved, BlockStored
from kvplug.sim.kv_cache import KvCache
from kvplug.sim.request import Request
from kvplug.sim.scheduler import Scheduler, SchedulerConfig
from kvplug.vllm_hashes import Lora
from tests.engines.engine_pool import Recipe, uses

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 48
NUM_POOL_EXAMPLES = 400
NUM_SCHEDULER_EXAMPLES = 300


class Driver:
    """vLLM's side: a process that plays what it is sent."""

    def __init__(self, module, *arguments):
        self._command = [ensure_vllm(), "-m", module, *arguments]
        self.seen = Counter()

    def start(self):
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self):
        assert self._read() == "ready"

    def play(self, **job):
        json.dump(job, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.seen["examples"] += 1
        return self._read()

    def stop(self):
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # it was still starting
            self._process.kill()
            self._process.wait()

    def _read(self):
        line = self._process.stdout.readline()
        assert line, f"the driver ended with code {self._process.wait(timeout=30)}"
        return json.loads(line)


POOL = Recipe("pool", lambda _: Driver("tests.engines.vllm_pool_driver"))
SCHEDULER = Recipe(
    "scheduler",
    lambda _: Driver("tests.engines.vllm_scheduler_driver", ensure_tiny_model(ensure_vllm())),
)


class SimulatedPool:
    """The simulated cache behind the operations that the driver knows."""

    def __init__(self, num_blocks, block_size, max_model_len):
        self.cache = KvCache(num_blocks, block_size, max_model_len)
        self.requests = {}

    def submit(self, name, prompt, salt, lora):
        size = self.cache.block_size
        self.requests[name] = Request(
            str(name), prompt, 1000, block_size=size, lora=lora and Lora(*lora), salt=salt
        )

    def admit(self, name, num_tokens):
        request = self.requests[name]
        hits = self.cache.find_hits(request)
        num_hits = len(hits) * self.cache.block_size
        num_tokens = min(num_tokens, request.num_tokens - num_hits)
        allocated = self.cache.allocate(request, num_tokens, hits, whole_must_fit=True)
        if allocated:
            request.num_computed = num_hits + num_tokens
        return [num_hits, allocated]

    def compute(self, name, num_tokens):
        request = self.requests[name]
        allocated = self.cache.allocate(request, num_tokens)
        request.num_computed += num_tokens if allocated else 0
        return allocated

    def append(self, name, token_id):
        self.requests[name].append(token_id)

    def free(self, name):
        self.cache.free(self.requests[name])
        self.requests[name].num_computed = 0

    def reset(self):
        return self.cache.pool.reset()

    def state(self):
        pool = self.cache.pool
        return {
            "events": list(map(plain, self.cache.take_events())),
            "free": pool.eviction_order(),
            "references": [pool.num_references(block) for block in range(1, pool.num_blocks)],
            "usage": pool.usage,
            "blocks": {
                str(name): list(self.cache.blocks_of(request))
                for name, request in self.requests.items()
            },
        }


def plain(event):
    """The event as it goes to the wire, so `wire` is compared too."""
    shape = wire.to_wire(event)
    match event:
        case BlockStored():
            keys = [entry and list(entry) for entry in shape.extra_keys]
            hashes, tokens = list(shape.block_hashes), list(shape.token_ids)
            parent, size = shape.parent_block_hash, shape.block_size
            return ["stored", hashes, parent, tokens, size, shape.lora_name, keys]
        case BlockRemoved():
            return ["removed", list(shape.block_hashes)]
    return ["cleared"]


# Prompts are cut from few long texts, and may turn from one into another: prefixes are shared.
PROMPTS = st.builds(
    lambda first, turn, second, length: [
        100 * (first if i < turn else second) + i for i in range(length)
    ],
    st.integers(0, 2),
    st.integers(0, 40),
    st.integers(0, 5),
    st.integers(1, 40),
)
REQUESTS = st.tuples(
    st.just("request"),
    PROMPTS,
    st.sampled_from(["", "", "", "salt"]),
    st.sampled_from([None, None, None, ["adapter", "/adapters/a"]]),
    st.sampled_from([48, 5, 13]),  # tokens of the first chunk
)
GOINGS_ON = st.tuples(st.just("go on"), st.integers(0, 9), st.integers(1, 20))
ENDS = st.tuples(st.sampled_from(["finish", "finish", "preempt"]), st.integers(0, 9))
CLEARS = st.tuples(st.just("clear"), st.integers(0, 7).map(lambda number: number == 7))
ACTIONS = st.one_of(REQUESTS, REQUESTS, GOINGS_ON, GOINGS_ON, ENDS, ENDS, CLEARS)
POOL_SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(5, 25),
        "block_size": st.sampled_from([4, 5, 8]),
        "max_model_len": st.just(MAX_MODEL_LEN),
    }
)


class Player:
    """Turns actions into operations that make sense in the state that they meet."""

    def __init__(self, sizes):
        self.pool, self.operations, self.answers = SimulatedPool(**sizes), [], []
        self.live, self.preempted, self._num_requests = [], [], 0

    def do(self, operation, *arguments):
        self.operations.append([operation, *arguments])
        result = getattr(self.pool, operation)(*arguments)
        self.answers.append([result, self.pool.state()])
        return result

    def act(self, action, *values):
        match action, *values:
            case "request", prompt, salt, lora, chunk:
                self.request(prompt, salt, lora, chunk)
            case "go on", index, amount if self.live:
                self.go_on(self.live[index % len(self.live)], amount)
            case "finish" | "preempt", index if self.live:
                name = self.live.pop(index % len(self.live))
                self.do("free", name)
                if action == "preempt":
                    self.preempted.append(name)
            case "clear", True:
                self.do("reset")

    def request(self, prompt, salt, lora, chunk):
        if self.preempted:  # it is at the head of the queue
            name = self.preempted[-1]
        else:
            name, self._num_requests = self._num_requests, self._num_requests + 1
            self.do("submit", name, prompt, salt, lora)
            self.preempted.append(name)
        if self.do("admit", name, chunk)[1]:
            self.live.append(self.preempted.pop())

    def go_on(self, name, amount):
        """A chunk of the prompt, or as many tokens of the answer, one a step."""
        request = self.pool.requests[name]
        missing = request.num_tokens - request.num_computed
        if missing:
            self.do("compute", name, min(amount, missing))
            return
        for token_id in range(amount):
            if request.num_tokens >= MAX_MODEL_LEN:
                return
            self.do("append", name, token_id % 2)
            if not self.do("compute", name, 1):
                return


SETTINGS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@settings(SETTINGS, max_examples=NUM_POOL_EXAMPLES)
@given(sizes=POOL_SIZES, actions=st.lists(ACTIONS, min_size=30, max_size=80))
def compare_pools(vllm_pool, sizes, actions):
    player = Player(sizes)
    for action in actions:
        player.act(*action)
    answers = vllm_pool.play(sizes=sizes, operations=player.operations)
    for operation, simulated, real in zip(player.operations, player.answers, answers, strict=True):
        assert simulated == real, operation
        count_operation(vllm_pool.seen, operation[0], *real)


def count_operation(seen, operation, result, state):
    seen.update(["operations", *(kind for kind, *_ in state["events"])])
    if operation == "admit":
        seen.update({"hits": result[0] > 0, "refused": not result[1]})
    elif operation in ("compute", "reset"):
        seen[f"{operation} refused"] += not result
    seen["shared blocks"] += max(state["references"]) > 1


@uses(POOL)
def test_the_simulated_cache_does_what_vllm_does(engine):
    compare_pools(engine)
    seen = engine.seen  # and the workloads had everything in them
    assert seen["examples"] >= NUM_POOL_EXAMPLES
    for what in ("stored", "removed", "cleared", "hits", "refused", "shared blocks"):
        assert seen[what] > 100, seen
    for what in ("compute refused", "reset refused"):
        assert seen[what] > 100, seen


# --- the scheduler ----------------------------------------------------------------------------

SCHEDULER_SIZES = st.fixed_dictionaries(
    {
        "num_gpu_blocks": st.integers(13, 25),
        "block_size": st.just(4),
        "max_model_len": st.just(MAX_MODEL_LEN),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.sampled_from([5, 16, 48]),
    }
)
ARRIVALS = st.lists(st.tuples(PROMPTS, st.integers(1, 30)), max_size=3)


def simulated_steps(sizes, arrivals):
    config = SchedulerConfig(**sizes)
    cache = KvCache(config.num_gpu_blocks, config.block_size, config.max_model_len)
    scheduler = Scheduler(config, cache)
    for arriving in arrivals:
        for name, prompt, max_tokens in arriving:
            scheduler.add(Request(name, prompt, max_tokens, block_size=config.block_size))
        plan = scheduler.plan()
        emitted = scheduler.complete(plan, lambda request: request.num_tokens % 3)
        yield {
            "chunks": [[chunk.request.request_id, chunk.num_tokens] for chunk in plan.chunks],
            "preempted": sorted(request.request_id for request in plan.preempted),
            "emitted": [token.request.request_id for token in emitted],
            "events": list(map(plain, cache.take_events())),
            "running": [request.request_id for request in scheduler.running],
            "num_waiting": len(scheduler.waiting),
            "usage": cache.pool.usage,
        }


@settings(SETTINGS, max_examples=NUM_SCHEDULER_EXAMPLES)
@given(sizes=SCHEDULER_SIZES, arriving=st.lists(ARRIVALS, min_size=3, max_size=12))
def compare_schedulers(vllm_scheduler, sizes, arriving):
    numbers = count()
    arrivals = [
        [
            (f"r{next(numbers)}", prompt, min(max_tokens, MAX_MODEL_LEN - len(prompt)))
            for prompt, max_tokens in each
        ]
        for each in [*arriving, *[[]] * 40]  # time to end what arrived
    ]
    steps = vllm_scheduler.play(sizes=sizes, arrivals=arrivals)
    for simulated, real in zip(simulated_steps(sizes, arrivals), steps, strict=True):
        assert simulated == real
        count_step(vllm_scheduler.seen, real)


def count_step(seen, step):
    seen.update(["steps", *(kind for kind, *_ in step["events"])])
    seen["preemptions"] += len(step["preempted"])
    seen["waiting"] += step["num_waiting"] > 0
    seen["batches"] += len(step["chunks"]) > 1


@uses(SCHEDULER)
def test_the_simulated_scheduler_does_what_vllm_does(engine):
    compare_schedulers(engine)
    seen = engine.seen
    assert seen["examples"] >= NUM_SCHEDULER_EXAMPLES
    for what in ("stored", "removed", "preemptions", "waiting", "batches"):
        assert seen[what] > 50, seen
