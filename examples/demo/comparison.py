"""The demo itself: two real engines, the same requests under two policies, one table.

In:  how many requests.   Out: whether all of them were answered.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.client import Outcome, send_all
from examples.demo.engine_env import ensure_tiny_model, ensure_vllm
from examples.demo.report import PolicyResult, print_report
from examples.demo.router_process import RouterProcess
from examples.demo.vllm_server import VllmServer, VllmSettings
from examples.demo.workload import MAX_TOKENS, ChatRequest, chat_request, make_requests

# Each with the router flags that go with it. Answers are short here, so nearly all work is
# prefill, and it gets the weight of the four requests that may be in flight. With the default of
# 1, one request in flight weighs as much as the prefill of a whole document, so that documents
# move to the idler engine: measured, 70 % of the prompt tokens were cached instead of 87 %.
POLICIES: Mapping[str, Sequence[str]] = {
    "round_robin": (),
    "kv": ("--kv-overlap-score-weight", "4"),
}
NUM_ENGINES = 2
# In blocks of 32 tokens: 16 documents of about 20 blocks do not fit into one engine; eight do, or
# nine or ten if they are shared unevenly, with the questions of the requests in flight.
NUM_GPU_BLOCKS = 240
CONCURRENCY = 4
# What only the first requests pay must not fall to a policy; too short to leave a block behind.
WARM_UP = (chat_request("", "Hello"),) * (2 * NUM_ENGINES)


def run(num_requests: int, *, log_dir: Path, console: Console, cleanup: ExitStack) -> bool:
    """Run the whole comparison; what was started stops when `cleanup` closes."""
    python = ensure_vllm()
    model_dir = ensure_tiny_model(python)
    settings = VllmSettings(python=python, model_dir=model_dir, num_gpu_blocks=NUM_GPU_BLOCKS)
    engines = [VllmServer(f"vllm-{i}", settings, log_dir=log_dir) for i in range(NUM_ENGINES)]
    start_engines(engines, console, cleanup)
    requests = make_requests(num_requests)
    results = [
        measure(policy, engines, requests, model_dir=model_dir, log_dir=log_dir, console=console)
        for policy in POLICIES
    ]
    print_report(console, results)
    return not any(result.failed for result in results)


def start_engines(engines: Sequence[VllmServer], console: Console, cleanup: ExitStack) -> None:
    """Start them side by side, and have each of them answer once."""
    with progress_bar(console, f"start {len(engines)} engines", len(engines)) as advance:
        for engine in engines:
            cleanup.enter_context(engine)
        for engine in engines:
            engine.wait_ready()
            engine.complete("Hello", max_tokens=MAX_TOKENS)
            advance()


def measure(
    policy: str,
    engines: Sequence[VllmServer],
    requests: Sequence[ChatRequest],
    *,
    model_dir: Path,
    log_dir: Path,
    console: Console,
) -> PolicyResult:
    """The requests under one policy, from empty caches, through a router of its own."""
    flags = POLICIES[policy]
    router = RouterProcess(policy, engines, model_dir=model_dir, log_dir=log_dir, extra_flags=flags)
    with router:
        router.wait_ready()
        # After the router has joined: it hears that all is cleared, and knows the rest from there.
        for engine in engines:
            engine.empty_cache()
        _send(WARM_UP, router.url, on_outcome=lambda: None)
        with progress_bar(console, policy, len(requests)) as advance:
            started = time.perf_counter()
            outcomes = _send(requests, router.url, on_outcome=advance)
            wall_s = time.perf_counter() - started
    return PolicyResult(policy, outcomes, wall_s)


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; gives the function that moves it one step."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _send(
    requests: Sequence[ChatRequest], url: str, *, on_outcome: Callable[[], None]
) -> list[Outcome]:
    return asyncio.run(send_all(requests, url=url, concurrency=CONCURRENCY, on_outcome=on_outcome))
