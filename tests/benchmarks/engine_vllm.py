"""What KV events cost vLLM's scheduler, per block of prompt: off, stock zmq, kvplug.

usage: make bench-engine, or in vLLM's environment:
       python -m tests.benchmarks.engine_vllm MODEL_DIR [NUM_ROUNDS]

One engine, in this process. Each round runs every mode once, in random order, on prompts nobody
has seen; between modes the scheduler's publisher is exchanged, and the block pool's event switch or
kvplug's recorder. A block is stored and another one evicted. Runs are short and rounds many, so
that what else the machine does falls on all modes alike.
A prompt is packed when its request arrives, so what that adds there is timed as well.
Timed are Scheduler.schedule and Scheduler.update_from_output, which is where events are made and
published: CPU time of the engine's thread, which other work on the machine does not lengthen.
Rates say nothing here: a tiny model on a CPU is slower than its scheduler.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

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
from vllm.distributed.kv_events import EventPublisherFactory, NullEventPublisher
from vllm.utils.gc_utils import freeze_gc_heap

from kvplug.engines.vllm import register

BLOCK_SIZE, PROMPT_TOKENS, PROMPTS_PER_RUN, TOKENS_PER_STEP = 32, 1600, 40, 16384
BLOCKS_PER_RUN = (PROMPTS_PER_RUN * PROMPT_TOKENS - TOKENS_PER_STEP) // BLOCK_SIZE  # timed

OFF, STOCK, RECORDED = "events off", "stock zmq", "kvplug"

SUBSCRIBER = """
import sys, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.setsockopt(zmq.SUBSCRIBE, b"")
sub.connect(sys.argv[1])
sub.recv_multipart()
print("reading", flush=True)
while True:
    sub.recv_multipart()
"""


class Step(NamedTuple):
    """What the scheduler took of its thread's CPU time, and of the clock's."""

    cpu_us: float
    wall_us: float


class Engine:
    """vLLM with a stopwatch around its scheduler."""

    def __init__(self, model_dir):
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.llm = LLM(
            model_dir,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=2000,
            max_num_seqs=64,
            max_num_batched_tokens=TOKENS_PER_STEP,
            kv_events_config=events,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.steps, self.arrival_us = [], 0.0
        self.core.preprocess_add_request = self._arriving(self.core.preprocess_add_request)
        self.scheduler.schedule = self._timed(self.scheduler.schedule, begins=True)
        self.scheduler.update_from_output = self._timed(self.scheduler.update_from_output)

    def _timed(self, method, begins=False):
        def timed(*args, **kwargs):
            if begins:
                self.steps.append(Step(0.0, 0.0))
            started, started_cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                cpu, wall = time.thread_time() - started_cpu, time.perf_counter() - started
                before = self.steps[-1]
                self.steps[-1] = Step(before.cpu_us + cpu * 1e6, before.wall_us + wall * 1e6)

        return timed

    def _arriving(self, method):
        def arriving(*args, **kwargs):
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.arrival_us += (time.thread_time() - started) * 1e6

        return arriving

    def run(self, mode, rnd):
        """One run, without its first step, which finds another publisher than the last run's."""
        prompts = [
            TokensPrompt(prompt_token_ids=[rnd.randrange(10, 4000) for _ in range(PROMPT_TOKENS)])
            for _ in range(PROMPTS_PER_RUN)
        ]
        self.scheduler.kv_event_publisher = mode.publisher or NullEventPublisher()
        self.pool.enable_kv_cache_events = mode.publisher is not None
        if mode.is_recorded:
            mode.publisher.record(self.scheduler, self.core)
        self.steps, self.arrival_us = [], 0.0
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self.llm.generate(prompts, sampling, use_tqdm=False)
        if mode.is_recorded:
            mode.publisher.end_record()
        return Run(self.steps[1:], self.arrival_us)


class Run(NamedTuple):
    """The steps, and what vLLM took to take the requests in: hashing them, mostly."""

    steps: list
    arrival_us: float

    @property
    def us_per_block(self):
        return sum(step.cpu_us for step in self.steps) / BLOCKS_PER_RUN

    @property
    def arrival_us_per_block(self):
        return self.arrival_us / (PROMPTS_PER_RUN * PROMPT_TOKENS / BLOCK_SIZE)


class Mode(NamedTuple):
    """How events are made and published; no publisher: not at all."""

    publisher: object = None
    is_recorded: bool = False


class Subscribers:
    """Processes that subscribe and read."""

    def __init__(self):
        self._processes = []

    def add(self, publisher, endpoint):
        from vllm.distributed.kv_events import KVEventBatch

        process = subprocess.Popen(
            [sys.executable, "-c", SUBSCRIBER, endpoint], stdout=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        reading = threading.Event()
        threading.Thread(target=lambda: process.stdout.readline() and reading.set()).start()
        while not reading.wait(0.05):
            publisher.publish(KVEventBatch(ts=0.0, events=[]))

    def end(self):
        for process in self._processes:
            process.kill()
            process.wait()


def create(name, endpoint, **more):
    config = KVEventsConfig(enable_kv_cache_events=True, publisher=name, endpoint=endpoint, **more)
    return EventPublisherFactory.create(config)


def make_modes(subscribers, folder):
    register()
    zmq, on, off = (
        create(*each)
        for each in (
            ("zmq", f"ipc://{folder}/zmq"),
            ("kvplug", f"ipc://{folder}/recorded"),
            ("kvplug", f"ipc://{folder}/stock"),
        )
    )
    os.environ["KVPLUG_WIRE"] = "vllm"
    on_stock_wire = create("kvplug", f"ipc://{folder}/stock-wire")
    del os.environ["KVPLUG_WIRE"]
    stopped = create("kvplug", f"ipc://{folder}/stopped", max_queue_size=1)
    os.kill(stopped.publisher.pid, signal.SIGSTOP)
    for publisher in (zmq, on, off, on_stock_wire):
        subscribers.add(publisher, publisher.get_publisher_config().endpoint)
    return {
        OFF: Mode(),
        "events made, nobody publishes": Mode(NullEventPublisher()),
        STOCK: Mode(zmq),
        RECORDED: Mode(on, is_recorded=True),
        "kvplug, wire vllm": Mode(on_stock_wire, is_recorded=True),
        "kvplug, sender stopped": Mode(stopped, is_recorded=True),
        "kvplug, KVPLUG_RECORDER=off": Mode(off),
    }


def measure(engine, modes, num_rounds, rnd):
    """{mode: a Run per round}; the first round is left out."""
    figures = {name: [] for name in modes}
    for round_ in range(num_rounds + 1):
        for name in rnd.sample(list(modes), len(modes)):
            run = engine.run(modes[name], rnd)
            if round_:
                figures[name].append(run)
    return figures


class Figures:
    """What one mode took: us per block in each round, and above events off of the same round."""

    def __init__(self, rounds, off):
        pairs = list(zip(rounds, off, strict=True))
        self.per_block = [run.us_per_block for run in rounds]
        added = [run.us_per_block - base.us_per_block for run, base in pairs]
        self.low, self.added, self.high = statistics.quantiles(added, n=4)
        arrivals = [run.arrival_us_per_block - base.arrival_us_per_block for run, base in pairs]
        self.arrival_low, self.arrival, self.arrival_high = statistics.quantiles(arrivals, n=4)
        walls = [step.wall_us for run in rounds for step in run.steps]
        self.p50_us, self.p99_us = (statistics.quantiles(walls, n=100)[at] for at in (49, 98))

    def row(self, name):
        low, median, high = statistics.quantiles(self.per_block, n=4)
        return (
            f"| {name} | {median:.2f} | {low:.2f} to {high:.2f} | {self.added:+.2f} "
            f"| {self.low:+.2f} to {self.high:+.2f} | {self.arrival:+.2f} "
            f"| {self.p50_us:.0f} | {self.p99_us:.0f} |"
        )


def report(rounds):
    figures = {name: Figures(values, rounds[OFF]) for name, values in rounds.items()}
    num_rounds = len(rounds[OFF])
    lines = [
        f"vLLM {__version__}, {num_rounds} rounds of {BLOCKS_PER_RUN} blocks; us of CPU time per "
        "block, and above off in the same round; us of a step by the clock",
        "| mode | median | quartiles | above off | quartiles | the same as requests arrive "
        "| p50 of a step | p99 |",
        "|---|---|---|---|---|---|---|---|",
        *(each.row(name) for name, each in figures.items()),
        json.dumps(metrics(figures)),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def metrics(figures):
    recorded, stock = figures[RECORDED], figures[STOCK]
    return {
        "vllm_added_us": {
            "value": round(recorded.added, 3),
            "min": round(recorded.low, 3),
            "max": round(recorded.high, 3),
            "stock": round(stock.added, 3),
            "stock_min": round(stock.low, 3),
            "stock_max": round(stock.high, 3),
            "ratio": round(stock.added / recorded.added, 1),
            "spread": "quartiles",
            "num_rounds": len(recorded.per_block),
        },
        "vllm_arrival_added_us": {
            "value": round(recorded.arrival, 3),
            "min": round(recorded.arrival_low, 3),
            "max": round(recorded.arrival_high, 3),
        },
        "vllm_step_p99_us": {
            "value": round(recorded.p99_us),
            "off": round(figures[OFF].p99_us),
            "stock": round(stock.p99_us),
        },
    }


def main(model_dir, num_rounds=20):
    engine, subscribers = Engine(model_dir), Subscribers()
    modes = {}
    try:
        modes = make_modes(subscribers, tempfile.mkdtemp(prefix="kvplug-bench-"))
        freeze_gc_heap()  # as vLLM's engine core process does when it is ready
        report(measure(engine, modes, num_rounds, random.Random(0)))
        assert modes["kvplug, sender stopped"].publisher.publisher.num_dropped > 0
        assert modes[RECORDED].publisher.publisher.num_dropped == 0
    finally:
        subscribers.end()
        end_senders(modes)
    sys.stdout.flush()
    os._exit(0)  # nothing that vLLM does at its exit is of interest


def end_senders(modes):
    for mode in modes.values():
        if hasattr(mode.publisher, "publisher"):
            os.kill(mode.publisher.publisher.pid, signal.SIGCONT)
            mode.publisher.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
