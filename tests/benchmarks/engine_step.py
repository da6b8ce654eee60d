"""What KV events cost vLLM's scheduler, per block of prompt: off, stock zmq, kvplug.

usage: make bench-engine, or in vLLM's environment:
       python -m tests.benchmarks.engine_step MODEL_DIR [NUM_ROUNDS]

One engine, in this process. Each round runs every mode once, in random order, on prompts nobody
has seen; between modes the block pool's event switch and the scheduler's publisher are exchanged.
Timed are Scheduler.schedule and Scheduler.update_from_output, which is where events are made and
published. Rates say nothing here: a tiny model on a CPU is slower than its scheduler.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

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

from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.engines.vllm import logger, register

BLOCK_SIZE, PROMPT_TOKENS, PROMPTS_PER_RUN = 32, 1600, 100
BLOCKS_PER_RUN = PROMPTS_PER_RUN * PROMPT_TOKENS // BLOCK_SIZE

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
            max_num_batched_tokens=16384,
            kv_events_config=events,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.busy_s = 0.0
        for name in ("schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))

    def _timed(self, method):
        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.busy_s += time.perf_counter() - started

        return timed

    def us_per_block(self, publisher, rnd):
        """One run with this publisher; None is without events."""
        self.pool.enable_kv_cache_events = publisher is not None
        self.scheduler.kv_event_publisher = publisher or NullEventPublisher()
        prompts = [
            TokensPrompt(prompt_token_ids=[rnd.randrange(10, 4000) for _ in range(PROMPT_TOKENS)])
            for _ in range(PROMPTS_PER_RUN)
        ]
        self.busy_s = 0.0
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self.llm.generate(prompts, sampling, use_tqdm=False)
        return self.busy_s / BLOCKS_PER_RUN * 1e6


class Subscribers:
    """Processes that subscribe: one that reads, one that has stopped."""

    def __init__(self):
        self._processes = []

    def add(self, publisher, endpoint, *, stopped=False):
        from vllm.distributed.kv_events import KVEventBatch

        process = subprocess.Popen(
            [sys.executable, "-c", SUBSCRIBER, endpoint], stdout=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        reading = threading.Event()
        threading.Thread(target=lambda: process.stdout.readline() and reading.set()).start()
        while not reading.wait(0.05):
            publisher.publish(KVEventBatch(ts=0.0, events=[]))
        if stopped:
            process.send_signal(signal.SIGSTOP)

    def end(self):
        for process in self._processes:
            process.kill()
            process.wait()


def create(name, endpoint, **more):
    config = KVEventsConfig(enable_kv_cache_events=True, publisher=name, endpoint=endpoint, **more)
    return EventPublisherFactory.create(config)


def with_full_queue():
    """kvplug's publisher with its thread stalled in the first batch, and room for one more."""
    stalled = Publisher(
        PublisherConfig(endpoint="tcp://127.0.0.1:0", max_queue_size=1),
        0,
        lambda _: threading.Event().wait(),
        logger,
    )
    for _ in range(3):
        stalled.publish(None)
    return stalled


def make_modes(subscribers, folder):
    register()
    modes = {
        "events off": None,
        "events made, nobody publishes": NullEventPublisher(),
        "stock zmq": create("zmq", f"ipc://{folder}/zmq"),
        "kvplug": create("kvplug", f"ipc://{folder}/kvplug"),
        "kvplug, nobody subscribes": create("kvplug", f"ipc://{folder}/alone"),
        "kvplug, subscriber stopped": create("kvplug", f"ipc://{folder}/stopped", hwm=100),
        "kvplug, sender stalled, queue full": with_full_queue(),
    }
    for name in ("stock zmq", "kvplug", "kvplug, subscriber stopped"):
        endpoint = modes[name].get_publisher_config().endpoint
        subscribers.add(modes[name], endpoint, stopped="stopped" in name)
    return modes


def measure(engine, modes, num_rounds, rnd):
    """{mode: one figure per round}; the first round fills the cache and is left out."""
    figures = {name: [] for name in modes}
    for round_ in range(num_rounds + 1):
        for name in rnd.sample(list(modes), len(modes)):
            figure = engine.us_per_block(modes[name], rnd)
            if round_:
                figures[name].append(figure)
    return figures


def report(figures):
    off = figures["events off"]
    lines = [
        f"vLLM {__version__}, {len(off)} rounds of {BLOCKS_PER_RUN} blocks; us per block",
        "| mode | median | quartiles | min to max | median - off, round by round |",
        "|---|---|---|---|---|",
    ]
    for name, values in figures.items():
        low, median, high = statistics.quantiles(values, n=4)
        more = statistics.median(value - base for value, base in zip(values, off, strict=True))
        lines.append(
            f"| {name} | {median:.2f} | {low:.2f} to {high:.2f} "
            f"| {min(values):.2f} to {max(values):.2f} | {more:+.2f} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def main(model_dir, num_rounds=15):
    engine, subscribers = Engine(model_dir), Subscribers()
    try:
        modes = make_modes(subscribers, tempfile.mkdtemp(prefix="kvplug-bench-"))
        report(measure(engine, modes, num_rounds, random.Random(0)))
        counted = modes["kvplug, sender stalled, queue full"]
        assert counted.num_dropped == counted.num_published - 2
        for name in ("kvplug", "kvplug, nobody subscribes", "kvplug, subscriber stopped"):
            assert modes[name].publisher.num_dropped == 0
    finally:
        subscribers.end()
    sys.stdout.flush()
    os._exit(0)  # nothing that vLLM does at its exit is of interest


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
